"""TensorBoard, Weights & Biases, MLflow and the CSV file show what the run's own files tell."""

import csv
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.experiments.recipe import run as run_experiment
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.loggers import CsvObserver, MLflowObserver, TensorBoardObserver
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer, Observers

TINY = ["--quiet", "--train-images", "300", "--test-images", "100", "--threads", "1"]


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_run_writes_its_curves_and_histograms(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert (
        main(
            [
                "run",
                *TINY,
                "--epochs",
                "3",
                "--warmup-epochs",
                "1",
                "--out",
                str(out),
                "--quiet",
                "--logger",
                "tensorboard",
            ]
        )
        == 0
    )
    metrics, written = RunFolder(out).read_lines("metrics"), read(out / "tensorboard")
    names = {"loss/train": "train_loss", "loss/gate_level": "gate_level", "retained/weights_percent": "weights_percent"}
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


def test_csv_has_a_row_for_every_epoch_and_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    path, layers = tmp_path / "metrics.csv", [{"name": "fc1", "channels": 7}]
    lines = [
        {"epoch": epoch, "train_loss": 1 / epoch, "gate_level": 0.5 if epoch > 2 else None, "layers": layers}
        for epoch in (1, 2, 3)
    ]
    first = CsvObserver(path)
    for line in lines[:2]:
        first.epoch(line, {})
    second = CsvObserver(path)  # after the checkpoint of the first epoch
    second.network(torch.nn.Identity(), [], lines[:1])
    for line in lines[1:]:
        second.epoch(line, {})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert [float(row["train_loss"]) for row in rows] == [line["train_loss"] for line in lines]
    assert [row["gate_level"] for row in rows] == ["", "", "0.5"]
    assert {row["channels/fc1"] for row in rows} == {"7"}


def test_mlflow_has_the_runs_curves_also_after_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    client, out = MlflowClient(store), tmp_path / "run"

    def found() -> Any:
        experiment = client.get_experiment_by_name("rlsprune")
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    class Stop(Observer):
        def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
            if metrics["epoch"] == 2:
                raise KeyboardInterrupt

    config = make_config("digits-fnn", "rls", epochs=3, warmup_epochs=1, train_images=300, test_images=100, threads=1)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config, RunFolder(out), Observers(MLflowObserver(out), Stop()))
    assert found().info.status == "KILLED"
    assert main(["run", "--resume", str(out), "--quiet", "--logger", "mlflow"]) == 0
    run, metrics = found(), RunFolder(out).read_lines("metrics")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["experiment"] == "digits-fnn"
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(point.step, point.value) for point in history] == [(line["epoch"], line["train_loss"]) for line in metrics]
    assert run.data.metrics["channels/fc1"] == RunFolder(out).read_summary()["layers"][1]["channels"]


def history_of(file: Path) -> list[dict[str, Any]]:
    """The rows in a file of wandb's offline mode: records in blocks of 32 kB, as LevelDB writes its log."""
    content, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            items = Record.FromString(record).history.item
            if items:
                rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            record = b""
    return rows


def test_wandb_has_the_runs_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert main(["run", *TINY, "--epochs", "2", "--warmup-epochs", "1", "--out", str(out), "--logger", "wandb"]) == 0
    wandb.teardown()  # its own process has then written everything
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    told = history_of(file)
    metrics = RunFolder(out).read_lines("metrics")
    assert [row["_step"] for row in told] == [1, 2]
    for name, key in {"loss/train": "train_loss", "accuracy": "accuracy"}.items():
        assert [row[name] for row in told] == [pytest.approx(line[key]) for line in metrics]


def test_loggers_are_off_without_being_asked_and_known_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "--epochs", "1", "--method", "none", "--out", str(tmp_path / "run")]) == 0
    assert {"metrics.csv", "tensorboard", "wandb-id", "mlflow-id"}.isdisjoint(
        path.name for path in (tmp_path / "run").iterdir()
    )
    assert main(["run", "--logger", "paper"]) == 2
    assert "--logger paper is not valid: choose one of csv, mlflow, tensorboard, wandb" in capsys.readouterr().err
