"""Reads the contents of a page from a run's folder, and refuses damaged files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsprune.app.config.metrics import Metric, metric_of
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError

__all__ = ["NUMBERS", "ReportedLayer", "ReportedRun", "read_runs"]

NUMBERS = (
    "train_loss",
    "test_loss",
    "gate_loss",
    "gate_level",
    "score",
    "nodes_percent",
    "weights_percent",
    "flops_percent",
    "seconds",
)
"""Keys of the numbers in an epoch's line; any may be missing."""

_SUMMARY_NUMBERS = (
    "latency_ms",
    "latency_unpruned_ms",
    "latency_batch",
)
_LARGEST = 1e100  # the largest number; beyond it arithmetic overflows
_MOST = 2**63  # the largest count
_REMEDY = "restore it, or start the run again"


@dataclass(frozen=True)
class ReportedLayer:
    """A layer's channels, nodes and weights, at full size and now; None if the files do not say."""

    name: str
    nodes: int
    weights: int
    nodes_percent: float
    weights_percent: float
    channels: int | None = None
    """None in files of version 0.1.0."""

    @property
    def full_channels(self) -> int | None:
        """Returns the channels before pruning; every channel has the same number of nodes."""
        return None if self.channels is None else _whole(self.channels, self.nodes_percent)

    @property
    def full_nodes(self) -> int | None:
        """Returns the nodes before pruning."""
        return _whole(self.nodes, self.nodes_percent)

    @property
    def full_weights(self) -> int | None:
        """Returns the weights before pruning."""
        return _whole(self.weights, self.weights_percent)


@dataclass(frozen=True)
class ReportedRun:
    """A run with the epochs and events it has so far."""

    path: Path
    label: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """A line per epoch: `epoch`, `NUMBERS` (None if unknown) and `layers`."""
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run is in progress."""
    environment: dict[str, Any]

    @property
    def layers(self) -> list[ReportedLayer]:
        """Returns the layers as they are now; empty if no epoch is done yet."""
        if self.summary is not None:
            return [ReportedLayer(**row) for row in self.summary["layers"]]
        return self.metrics[-1]["layers"] if self.metrics else []

    @property
    def metric(self) -> Metric:
        """Returns the metric of the score in every epoch's line."""
        return metric_of(self.config)

    @property
    def epochs(self) -> int | None:
        """Returns the planned number of epochs."""
        planned = self.config.get("epochs")
        return planned if isinstance(planned, int) else None


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[ReportedRun]:
    """Reads the folders of runs, finished or not.

    Raises:
        FileError: A file is missing or damaged.
        ValueError: There is no folder, or one is given twice.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("there is no run to report: give the folders of one or more runs")
    for path in paths:
        if sum(path.resolve() == other.resolve() for other in paths) > 1:
            raise ValueError(f"{path} is given twice: give each run once")
    names = [path.resolve().name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [_read(path, label) for path, label in zip(paths, labels, strict=True)]


def _read(path: Path, label: str) -> ReportedRun:
    folder = RunFolder(path)
    config = folder.read_json("config")
    # A run writes its config first, and the other files after its data are loaded.
    lines = {name: _lines(folder, name) for name in ("metrics", "events")}
    environment = folder.read_json("environment") if (path / "environment.json").is_file() else {}
    summary = folder.read_summary() if folder.finished else None
    score = metric_of(config).name
    if summary is not None:
        _check_summary(path / "summary.json", summary, score)
    metrics = [_epoch(path / "metrics.jsonl", number, line, score) for number, line in enumerate(lines["metrics"], 1)]
    events = [_event(path / "events.jsonl", number, line, score) for number, line in enumerate(lines["events"], 1)]
    return ReportedRun(path, label, config, metrics, events, summary, environment)


def _lines(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    missing = not (folder.path / f"{name}.jsonl").exists()
    return [] if missing and not folder.finished else folder.read_lines(name)


def _epoch(path: Path, number: int, line: dict[str, Any], score: str) -> dict[str, Any]:
    where = f"line {number}"
    if line.get("epoch") != number:
        raise FileError(path, f"{where} has epoch {line.get('epoch')!r}, not {number}", _REMEDY)
    numbers = {name: _number(path, where, line, score if name == "score" else name) for name in NUMBERS}
    return {"epoch": number, **numbers, "layers": _layers(path, where, line.get("layers", []))}


def _event(path: Path, number: int, line: dict[str, Any], score: str) -> dict[str, Any]:
    where = f"line {number}"
    _check_counts(path, where, line, ("epoch",))
    layers = line.get("layers", [])
    for layer in _check_rows(path, f"the list of layers of {where}", layers):
        _check_counts(path, where, layer, ("before", "after"))
    kind = "roll-back" if line.get("kind") == "roll-back" else "prune"
    return {
        "epoch": line["epoch"],
        "kind": kind,
        **{name: _number(path, where, line, name) for name in ("loss", "epochs_to_recover")},
        **{f"score_{when}": _number(path, where, line, f"{score}_{when}") for when in ("before", "after")},
        "layers": [(layer["name"], layer["before"], layer["after"]) for layer in layers],
    }


def _check_summary(path: Path, summary: dict[str, Any], score: str) -> None:
    for name in ("", "unpruned_", "given_", "int8_"):
        summary[f"{name}score"] = _number(path, "it", summary, f"{name}{score}")
    for name in _SUMMARY_NUMBERS:
        summary[name] = _number(path, "it", summary, name)
    speedups = summary.setdefault("speedups", [])
    if not isinstance(speedups, list) or not all(isinstance(row, dict) for row in speedups):
        raise FileError(path, "its speedups are not a list of objects", _REMEDY)
    for row in speedups:
        _check_counts(path, "speedups", row, ("batch",))
        for name in ("low", "median", "high"):
            row[name] = _number(path, "speedups", row, name)
    rows = _layers(path, "it", summary.get("layers", []))
    summary["layers"] = [vars(row) for row in rows]
    kept = summary.get("kept_inputs")
    if kept is not None and not (isinstance(kept, list) and all(_is_count(index) for index in kept)):
        raise FileError(path, "its kept_inputs are not a list of indices", _REMEDY)
    health = summary.get("health")
    for row in _check_rows(path, "health", [] if health is None else health):
        for name in ("smallest_eigenvalue", "largest_eigenvalue", "trace", "asymmetry"):
            row[name] = _number(path, "health", row, name)
        _check_counts(path, "health", row, ("inputs",))
        row["healthy"] = row.get("healthy") is True


def _layers(path: Path, where: str, rows: Any) -> list[ReportedLayer]:
    for row in _check_rows(path, f"the list of layers of {where}", rows):
        _check_counts(path, where, row, ("nodes", "weights", *(["channels"] if "channels" in row else [])))
    return [
        ReportedLayer(
            row["name"],
            row["nodes"],
            row["weights"],
            _number(path, where, row, "nodes_percent") or 0.0,
            _number(path, where, row, "weights_percent") or 0.0,
            row.get("channels"),
        )
        for row in rows
    ]


def _check_rows(path: Path, where: str, rows: Any) -> list[dict[str, Any]]:
    """Returns the rows if they are a list of objects with a name, else raises FileError."""
    if not isinstance(rows, list) or not all(map(_has_name, rows)):
        raise FileError(path, f"{where} is not a list of objects with a name", _REMEDY)
    return rows


def _has_name(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("name"), str)


def _check_counts(path: Path, where: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if not _is_count(values.get(name)):
            raise FileError(path, f"{where} has {name} {values.get(name)!r}, which is not a count", _REMEDY)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _number(path: Path, where: str, values: Mapping[str, Any], name: str) -> float | None:
    """Returns a number, or None if it is missing, not finite or absurdly large."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileError(path, f"{where} has {name} {value!r}, which is not a number", _REMEDY)
    return value if abs(value) <= _LARGEST else None


def _whole(part: int, percentage: float) -> int | None:
    if percentage:
        whole = 100 * part / percentage
        return round(whole) if abs(whole) <= _MOST else None
    return 0 if not part else None
