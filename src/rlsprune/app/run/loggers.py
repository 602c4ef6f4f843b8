"""Loggers that send a run to TensorBoard, Weights & Biases, MLflow, or a CSV file."""

from __future__ import annotations

import csv
import io
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsprune.app.run.observer import Observer
from rlsprune.io.atomic import replacing, storing

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

    from rlsprune.app.run.method import Retained

__all__ = ["LOGGERS", "CsvObserver", "MLflowObserver", "TensorBoardObserver", "WandbObserver", "make_logger"]

LOGGERS = ("csv", "mlflow", "tensorboard", "wandb")

_PROJECT = "rlsprune"
_TAGS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "gate_loss": "loss/gate",
    "gate_level": "loss/gate_level",
    "weights_percent": "retained/weights_percent",
    "nodes_percent": "retained/nodes_percent",
    "flops_percent": "retained/flops_percent",
}
"""The tags of an epoch's numbers; numbers that are not listed here keep their own names."""


def make_logger(name: str, folder: str | os.PathLike[str]) -> Observer:
    """Makes the observer of that name.

    Args:
        name: One of `LOGGERS`.
        folder: The run's folder.

    Raises:
        ImportError: The logger's package is not installed.
    """
    path = Path(folder)
    made: dict[str, Callable[[], Observer]] = {
        "csv": lambda: CsvObserver(path / "metrics.csv"),
        "mlflow": lambda: MLflowObserver(path),
        "tensorboard": lambda: TensorBoardObserver(path / "tensorboard"),
        "wandb": lambda: WandbObserver(path),
    }
    return made[name]()


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns an epoch's known numbers."""
    return {
        name: float(value) for name, value in line.items() if isinstance(value, int | float) and type(value) is not bool
    }


def _scalars(line: Mapping[str, Any], counts: Mapping[str, Retained]) -> dict[str, float]:
    """Returns the scalars of an epoch for a logger: its numbers, and the channels of every layer."""
    numbers = {_TAGS.get(name, name): value for name, value in _numbers(line).items() if name != "epoch"}
    return numbers | {f"channels/{name}": float(count.channels) for name, count in counts.items()}


class CsvObserver(Observer):
    """Rewrites the table of the epochs' numbers after each epoch; a resumed run continues the same table.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, float]] = []

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Starts the table with the epochs that were done before."""
        self._rows = [self._row(line) for line in metrics]

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Adds a row."""
        self._rows.append(self._row(metrics))
        text = io.StringIO()
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        with storing(self._path), replacing(self._path) as path:
            path.write_text(text.getvalue(), encoding="utf-8")

    def _row(self, line: Mapping[str, Any]) -> dict[str, float]:
        channels = {f"channels/{layer['name']}": layer["channels"] for layer in line.get("layers", ())}
        return _numbers(line) | {"epoch": line["epoch"]} | channels


class TensorBoardObserver(Observer):
    """Writes an event file; needs the package tensorboard. A resumed run continues the same curves.

    Args:
        folder: The folder of the file; ``tensorboard --logdir`` with this folder or a parent shows it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401  # if missing, raises before the run

        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None
        self._model: nn.Module | None = None

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Opens the file, and hides what an earlier part of the run wrote about later epochs."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=done + 1)

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps the network for its histograms."""
        self._model = model

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Writes the epoch's numbers, the channels of every layer, and the weights."""
        if self._writer is None:
            return
        epoch = metrics["epoch"]
        for tag, value in _scalars(metrics, counts).items():
            self._writer.add_scalar(tag, value, epoch)
        for name, parameter in self._model.named_parameters() if self._model is not None else ():
            self._writer.add_histogram(name.replace(".", "/"), parameter.detach().float().cpu(), epoch)
        self._writer.flush()  # makes the epoch visible at once

    def event(self, event: Mapping[str, Any]) -> None:
        """Writes in words what was pruned."""
        if self._writer is not None:
            changes = ", ".join(f"{layer['name']} {layer['before']} → {layer['after']}" for layer in event["layers"])
            self._writer.add_text("events", f"{event['kind']}: {changes}", event["epoch"])

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class WandbObserver(Observer):
    """Logs to Weights & Biases as its environment variables say (`WANDB_MODE=offline`, `WANDB_PROJECT`, …).

    Args:
        folder: The run's folder, which gives the run its name; a resumed run continues the same one.
    """

    def __init__(self, folder: Path) -> None:
        import wandb

        self._wandb, self._folder = wandb, folder
        self._run: Any = None

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Opens the run."""
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=self._folder.resolve().name,
            id=_identity(self._folder / "wandb-id", done, lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            config=dict(config),
        )

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Logs the epoch's numbers."""
        if self._run is not None:
            self._run.log(_scalars(metrics, counts), step=metrics["epoch"])

    def end(self, summary: Mapping[str, Any]) -> None:
        """Logs the summary's numbers."""
        if self._run is not None:
            self._run.summary.update(_numbers(summary))
            self._run.finish()  # wandb finishes a run that was stopped when the process ends
            self._run = None


class MLflowObserver(Observer):
    """Logs to the MLflow at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME` or "rlsprune".

    Args:
        folder: The run's folder, which gives the run its name; a resumed run continues the same one.
    """

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._folder, self._run = folder, ""
        try:
            self._client = MlflowClient()
        except MlflowException as error:
            raise ValueError(
                f"--logger mlflow cannot open its store ({str(error).split('. ')[0]}): set MLFLOW_TRACKING_URI to a "
                "server, or to sqlite:///mlflow.db with the whole package mlflow installed"
            ) from error

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Opens the run."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)

        def create() -> str:
            identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run: str = self._client.create_run(identity, run_name=self._folder.resolve().name).info.run_id
            for key, value in config.items():
                self._client.log_param(run, key, value)
            return run

        self._run = _identity(self._folder / "mlflow-id", done, create)
        self._client.update_run(self._run, status="RUNNING")

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Logs the epoch's numbers."""
        for name, value in _scalars(metrics, counts).items():
            self._client.log_metric(self._run, name, value, step=metrics["epoch"])

    def end(self, summary: Mapping[str, Any]) -> None:
        """Logs the summary's numbers."""
        for name, value in _numbers(summary).items():
            self._client.log_metric(self._run, f"summary/{name}", value)
        self._client.set_terminated(self._run)

    def close(self) -> None:
        """Marks the run as stopped, unless `end` was called before."""
        if self._run:
            self._client.set_terminated(self._run, "KILLED")


def _identity(path: Path, done: int, new: Callable[[], str]) -> str:
    """Returns the run's identity at a service: that of the earlier part if there was one, else a new one."""
    if done and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    identity = new()
    with storing(path), replacing(path) as temporary:
        temporary.write_text(identity + "\n", encoding="utf-8")
    return identity
