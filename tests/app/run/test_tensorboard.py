"""TensorBoard shows what the run's own files tell."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsprune.app.cli.main import main
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer, Observers
from rlsprune.app.run.tensorboard import TensorBoardObserver


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_run_writes_its_curves_and_histograms(tmp_path: Path) -> None:
    out = tmp_path / "run"
    tiny = ["--train-images", "300", "--test-images", "100", "--threads", "1", "--warmup-epochs", "1"]
    assert main(["run", *tiny, "--epochs", "3", "--out", str(out), "--quiet", "--tensorboard"]) == 0
    metrics, written = RunFolder(out).read_lines("metrics"), read(out / "tensorboard")
    names = {"loss/train": "train_loss", "loss/gate level": "gate_level", "retained/weights %": "weights_percent"}
    for tag, name in names.items():
        told = [(event.step, event.value) for event in written.Scalars(tag)]
        known = [line for line in metrics if line[name] is not None]
        assert told == [(line["epoch"], pytest.approx(line[name], rel=1e-6)) for line in known]
    assert metrics[0]["gate_level"] is None, "before the first prune there is no level"
    assert metrics[1]["gate_level"] is not None
    for layer in metrics[-1]["layers"]:
        assert written.Scalars(f"channels/{layer['name']}")[-1].value == layer["channels"]
    histograms = written.Histograms("fc1/weight")
    weights = next(layer["weights"] for layer in metrics[-1]["layers"] if layer["name"] == "fc1")
    assert [event.step for event in histograms] == [1, 2, 3]
    assert histograms[0].histogram_value.num == 784 * 1024
    assert histograms[-1].histogram_value.num == weights


def test_what_was_written_after_the_checkpoint_is_not_shown_twice(tmp_path: Path) -> None:
    def part(done: int, last: int, loss: float) -> None:
        observer = TensorBoardObserver(tmp_path)
        observer.start({}, done, 5, 1)
        for epoch in range(done + 1, last + 1):
            observer.epoch({"epoch": epoch, "train_loss": loss}, {"a": Retained(1, 1, 1)})
        observer.close()

    part(0, 3, loss=1.0)  # epochs 1 to 3, and then the machine went down
    part(2, 5, loss=2.0)  # after the checkpoint of epoch 2
    told = [(event.step, event.value) for event in read(tmp_path).Scalars("loss/train")]
    assert told == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_observers_are_all_told_and_all_closed() -> None:
    class Told(Observer):
        def __init__(self, fails: bool = False) -> None:
            self.calls: list[str] = []
            self.fails = fails

        def __getattribute__(self, name: str) -> Any:
            if name in vars(Observer) and not name.startswith("_"):
                self.calls.append(name)
            return super().__getattribute__(name)

        def close(self) -> None:
            if self.fails:
                raise OSError("the disk is full")

    first, second = Told(fails=True), Told()
    both = Observers(first, second)
    both.start({}, 0, 1, 1)
    both.network(torch.nn.Identity(), [], [])
    both.batch(1, torch.zeros(()))
    both.event({})
    both.epoch({}, {})
    both.end({})
    with pytest.raises(OSError, match="the disk is full"):
        both.close()
    told = {name for name in vars(Observer) if not name.startswith("_")}
    assert first.calls == second.calls
    assert set(first.calls) == told
