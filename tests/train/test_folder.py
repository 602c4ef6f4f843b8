from pathlib import Path

import pytest
import torch
from torch import nn

from rlsprune.files import FileError
from rlsprune.train.folder import RunFolder


def test_json_and_lines_come_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    assert not folder.started
    folder.write_json("config", {"seed": 1, "gate": None})
    folder.write_lines("metrics", [{"epoch": 1}, {"epoch": 2}])
    assert folder.started
    assert not folder.finished
    assert folder.read_json("config") == {"seed": 1, "gate": None}
    assert folder.read_lines("metrics") == [{"epoch": 1}, {"epoch": 2}]


def test_last_two_checkpoints_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    model = nn.Linear(3, 2)
    for epoch in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(epoch)
        folder.save_checkpoint(epoch, model, {"tensor": torch.tensor([epoch]), "list": [1.5, None, "x"]})
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["epoch-000002", "epoch-000003"]
    fresh = nn.Linear(3, 2)
    loaded = folder.load_checkpoint(into=fresh)
    assert loaded is not None
    assert loaded[0] == 3
    assert loaded[1]["tensor"].item() == 3
    assert loaded[1]["list"] == [1.5, None, "x"]
    assert torch.equal(fresh.weight, model.weight)


def test_checkpoint_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    model = nn.Linear(3, 2)
    folder.save_checkpoint(1, model, {})
    half = tmp_path / "checkpoint" / ".writing"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    loaded = folder.load_checkpoint(into=nn.Linear(3, 2))
    assert loaded is not None
    assert loaded[0] == 1
    folder.save_checkpoint(2, model, {})
    assert not half.exists()


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).load_checkpoint(into=nn.Linear(3, 2)) is None


@pytest.mark.parametrize("content", [b"", b"\x80garbage", b"PK\x03\x04"])
def test_damaged_checkpoint_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(1, nn.Linear(3, 2), {})
    (tmp_path / "checkpoint" / "epoch-000001" / "state.pt").write_bytes(content)
    with pytest.raises(FileError, match="delete the folder"):
        folder.load_checkpoint(into=nn.Linear(3, 2))


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_damaged_json_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FileError, match=r"config\.json"):
        RunFolder(tmp_path).read_json("config")


def test_folder_without_a_run_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="give the folder of a run"):
        RunFolder(tmp_path).read_json("config")
