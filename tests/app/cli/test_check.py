"""`rlsprune check` finds what is wrong, changes nothing and executes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rlsprune
from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.experiments.recipe import run
from rlsprune.app.run.folder import RunFolder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "run")
    run(
        make_config("digits-fnn", "rls", epochs=2, warmup_epochs=0, train_images=200, test_images=50, threads=1), folder
    )
    return folder.path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def last_line_gone(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def not_finite(path: Path) -> None:
    model = rlsprune.load(path / "model.safetensors", into=make_network())
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    rlsprune.save(model, path / "model.safetensors")


def make_network() -> torch.nn.Module:
    from rlsprune.app.models import FNN

    return FNN()


def other_name(path: Path) -> None:
    [checkpoint] = (path / "checkpoint").iterdir()
    checkpoint.rename(checkpoint.with_name("epoch-000007"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors: ": lambda path: flip(path / "model.safetensors", -9),
    "does not match its checksum": lambda path: flip(next(path.glob("checkpoint/*/state.safetensors")), -9),
    "its state belongs to epoch 2": other_name,
    "config.json": lambda path: (path / "config.json").write_text("{}"),
    "summary.json": lambda path: (path / "summary.json").write_text("{}"),
    "it has 1 lines": lambda path: last_line_gone(path / "metrics.jsonl"),
    "its events are not those of events.jsonl": lambda path: last_line_gone(path / "events.jsonl"),
    "is a symbolic link": lambda path: (path / "odd").symlink_to("/etc/passwd"),
    "numbers that are not finite": not_finite,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_what_is_wrong_with_a_run_is_said(
    said: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(sound, path)
    assert main(["check", str(path)]) == 0
    assert "WRONG" not in capsys.readouterr().out
    DAMAGES[said](path)
    before = contents(path)
    assert main(["check", str(path)]) == 2
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert any(said in line for line in wrong), wrong
    assert contents(path) == before


def test_a_run_that_goes_on_says_from_where(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(sound, path)
    (path / "summary.json").unlink()
    assert main(["check", str(path)]) == 0
    assert "resuming continues after epoch 2" in capsys.readouterr().out


def test_files(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (sound / "model.safetensors", *sound.glob("checkpoint/*/*.safetensors")):
        copy = tmp_path / file.name
        shutil.copy(file, copy)
        assert main(["check", str(copy)]) == 0
        assert "checksum right" in capsys.readouterr().out
        flip(copy, -1)
        assert main(["check", str(copy)]) == 2
        assert "checksum" in capsys.readouterr().out
    (tmp_path / "x.json").write_text(json.dumps({}))
    assert main(["check", str(tmp_path / "x.json")]) == 2
    assert main(["check", str(tmp_path / "nothing")]) == 2
