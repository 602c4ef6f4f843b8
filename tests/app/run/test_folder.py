import os
import resource
from pathlib import Path

import pytest

from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError


def test_json_and_lines_come_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    assert not folder.started
    folder.write_json("config", {"seed": 1, "gate": None})
    folder.write_lines("metrics", [{"epoch": 1}, {"epoch": 2}])
    assert folder.started
    assert not folder.finished
    assert folder.read_json("config") == {"seed": 1, "gate": None}
    assert folder.read_lines("metrics") == [{"epoch": 1}, {"epoch": 2}]


@pytest.mark.parametrize("text", ["{", "[1]", "", "[" * 100_000, "9" * 5000, "\udcff"], ids=range(6))
def test_damaged_json_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(FileError, match=r"config\.json"):
        RunFolder(tmp_path).read_json("config")
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n' + (text or "7"), errors="surrogateescape")
    with pytest.raises(FileError, match=r"metrics\.jsonl"):
        RunFolder(tmp_path).read_lines("metrics")


def test_what_is_no_ordinary_text_file_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FileError, match="not a regular file"):
        RunFolder(tmp_path).read_json("config")
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**40)  # sparse: takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match="larger than the 67,108,864 bytes"):
        RunFolder(tmp_path).read_lines("metrics")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"name": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert folder.read_lines("metrics") == [{"name": "a\u2028b\x85c"}]


def test_folder_without_a_run_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="give the folder of a run"):
        RunFolder(tmp_path).read_json("config")


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.jsonl", "checkpoint", "checkpoint/epoch-1", ".lock"])
def test_a_link_in_a_run_folder_is_refused_by_name_before_anything_is_written(tmp_path: Path, name: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    link = run / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if name.startswith("checkpoint") else outside / "precious")
    with pytest.raises(FileError, match=f"{name}.*symbolic link"), RunFolder(run).locked():
        pass
    assert (outside / "precious").read_text() == "precious"
    assert [entry.name for entry in outside.iterdir()] == ["precious"]
