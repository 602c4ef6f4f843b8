"""A run that was killed goes on as if nothing had happened."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.experiments.recipe import run
from rlsprune.app.report import write_report
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer

KILLED_IN_EPOCH = 3

# Dies in the middle of an epoch without a chance to clean up.
KILLED = """
import os, signal, sys
from rlsprune.app.config.experiment import make_config
from rlsprune.app.experiments.recipe import run
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer

class Killer(Observer):
    done = 0
    def epoch(self, metrics, counts):
        self.done = metrics["epoch"]
    def batch(self, number, loss):
        if self.done == {epoch} - 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

run(make_config("digits-fnn", {method!r}, **{options!r}), RunFolder({folder!r}), Killer())
"""


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("seconds", "cpu_seconds")} for line in lines]


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# By then rls has pruned and keeps a network to go back to; weight-level pruning keeps masks.
@pytest.mark.parametrize("method", ["rls", pytest.param("weight-level", marks=pytest.mark.slow)])
def test_killed_and_resumed_run_ends_with_the_same_numbers(tmp_path: Path, tiny: dict[str, Any], method: str) -> None:
    options = {**tiny, "epochs": 4, "warmup_epochs": 0}
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    run(make_config("digits-fnn", method, **options), whole)

    script = KILLED.format(epoch=KILLED_IN_EPOCH, method=method, options=options, folder=str(broken.path))
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert killed.returncode < 0, killed.stderr
    # Another process, the same numbers.
    before = broken.read_lines("metrics")
    assert without_times(before) == without_times(whole.read_lines("metrics"))[: KILLED_IN_EPOCH - 1]
    assert not broken.finished

    assert main(["run", "--resume", str(broken.path), "--quiet"]) == 0
    assert without_times(broken.read_lines("metrics")) == without_times(whole.read_lines("metrics"))
    assert broken.read_lines("events") == whole.read_lines("events")
    assert whole.read_lines("events"), "nothing was pruned, so nothing was tested"
    assert_same_tensors(broken.model, whole.model)


class Interrupt(Observer):
    """Ctrl-C in the second epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        self.epochs += 1

    def batch(self, number: int, loss: torch.Tensor) -> None:
        if self.epochs == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("cifar10-vgg", "rls-paper"),
        ("cifar10-vgg", "net-slimming"),
        ("cifar10-resnet20", "rls"),
        ("cifar10-resnet20", "depgraph"),
    ],
)
def test_convolutions_resume_in_the_same_memory_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.arange(96) % 10)
    monkeypatch.setattr("rlsprune.app.data.load", lambda *_: Dataset("cifar10", tuple("0123456789"), split, split))
    config = make_config(name, method, epochs=3, warmup_epochs=0, train_images=64, test_images=50, threads=1)
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    run(config, whole)
    with pytest.raises(KeyboardInterrupt):
        run(config, broken, Interrupt())
    run(config, broken)
    assert whole.read_lines("events"), "nothing was pruned, so nothing was tested"
    assert without_times(broken.read_lines("metrics")) == without_times(whole.read_lines("metrics"))
    assert_same_tensors(broken.model, whole.model)


def test_resuming_a_finished_run_changes_nothing(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    run(make_config("digits-fnn", "none", epochs=1, **tiny), folder)
    write_report([tmp_path], tmp_path / "report.html")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert main(["run", "--resume", str(tmp_path)]) == 0
    assert "is finished" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_resuming_a_finished_run_writes_what_is_missing(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """It was killed after its last epoch, before the page and the pictures were there."""
    folder = RunFolder(tmp_path / "run")
    run(make_config("digits-fnn", "rls", **{**tiny, "epochs": 3, "warmup_epochs": 1, "ratio": 0.5}), folder)
    assert folder.read_json("summary")["kept_inputs"], "no pixel was pruned, so there is no picture"
    pictures = {folder.path / "report.html", folder.path / "pixels.png"}
    assert main(["run", "--resume", str(folder.path), "--quiet"]) == 0
    assert all(path.stat().st_size > 1000 for path in pictures)
    (folder.path / "pixels.png").unlink()
    written = (folder.path / "report.html").stat().st_mtime_ns
    assert main(["run", "--resume", str(folder.path), "--quiet"]) == 0
    assert (folder.path / "pixels.png").is_file()
    assert (folder.path / "report.html").stat().st_mtime_ns == written
    outside = tmp_path / "outside.html"
    (folder.path / "report.html").unlink()
    (folder.path / "report.html").symlink_to(outside)
    assert main(["run", "--resume", str(folder.path), "--quiet"]) == 2
    assert not outside.exists()


@pytest.mark.parametrize("content", ["{}", '{"seed": "\\u001b[2J"}', "[]", "", '{"method": 1}'])
def test_a_summary_that_says_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("config", make_config("digits-fnn").to_dict())
    (tmp_path / "summary.json").write_text(content)
    assert main(["run", "--resume", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "summary.json" in said
    assert "Error" not in said
    assert "\x1b" not in said


def test_run_of_a_device_that_is_not_here_goes_on_with_another(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_json(
        "config", make_config("digits-fnn", "none", **{**tiny, "epochs": 1, "device": "cuda:99"}).to_dict()
    )
    assert main(["run", "--resume", str(folder.path)]) == 2
    assert "device cuda:99 cannot be used here" in capsys.readouterr().err
    assert main(["run", "--resume", str(folder.path), "--device", "cpu", "--quiet"]) == 0
    assert folder.read_json("config")["device"] == "cpu"
    folder.write_json("config", {**folder.read_json("config"), "device": "cuda:99"})
    assert main(["pareto", str(folder.path)]) == 2
    assert "--device cuda:99 cannot be used here" in capsys.readouterr().err


def test_resume_takes_no_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(tmp_path).write_json("config", make_config("digits-fnn").to_dict())
    assert main(["run", "--resume", str(tmp_path), "--epochs", "9"]) == 2
    assert "leave out epochs" in capsys.readouterr().err
