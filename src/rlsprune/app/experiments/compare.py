"""Figures of a comparison of finished runs: means over seeds, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsprune.app.experiments.paper import TABLES
from rlsprune.app.experiments.queue import PlannedRun
from rlsprune.app.experiments.registry import experiment
from rlsprune.app.run.folder import RunFolder

__all__ = ["compare_runs"]

_MEASURES = {
    "accuracy": "mean_accuracy",  # the paper's tables show means of the last epochs
    "loss": "mean_loss",
    "final_accuracy": "accuracy",
    "nodes_percent": "nodes_percent",
    "weights_percent": "weights_percent",
    "flops_percent": "flops_percent",
    "latency_ms": "latency_ms",
    "latency_unpruned_ms": "latency_unpruned_ms",
    "seconds": "seconds",
    "epochs": "epochs",
    "events": "events",
}
"""A column's figures, and their keys in a run's summary."""


def compare_runs(name: str, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Computes everything that the tables show, as plain containers.

    Args:
        name: The experiment.
        runs: Finished runs from `queue.comparison`, including one of an unpruned network.

    Raises:
        ValueError: None of them is unpruned.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    folders = {label: [run.folder for run in runs if run.label == label] for label in labels}
    columns = {label: _column(paths) for label, paths in folders.items()}
    methods = {run.label: run.twin for run in runs if run.twin is not None}
    unpruned = {label: columns[label] for label in labels if label not in methods}
    if not unpruned:
        wanted = ", ".join(dict.fromkeys(filter(None, methods.values())))
        raise ValueError(f"none of the finished runs is unpruned: run one of {wanted} first")
    for label, twin in methods.items():
        found = unpruned.get(twin or "")
        columns[label]["unpruned"] = None if found is None else {key: found[key] for key in ("accuracy", "loss")}
    table = experiment(name).table
    return {
        "experiment": name,
        "title": experiment(name).title,
        "seeds": list(dict.fromkeys(run.config.seed for run in runs)),
        "preset": runs[0].config.preset,
        "methods": {label: columns[label] for label in methods},
        "unpruned": unpruned,
        "paper_table": table,
        "paper": {} if table is None else {label: vars(column) for label, column in TABLES[table].items()},
    }


def _column(paths: Iterable[Path]) -> dict[str, Any]:
    folders = [RunFolder(path) for path in paths]
    summaries = [folder.read_summary() for folder in folders]
    events = [event for folder in folders for event in folder.read_lines("events") if event["kind"] == "prune"]
    lost = [event["accuracy_before"] - event["accuracy_after"] for event in events]
    waits = [event["epochs_to_recover"] for event in events if event["epochs_to_recover"] is not None]
    return {
        "runs": len(summaries),
        **{name: _over_runs([summary[own] for summary in summaries]) for name, own in _MEASURES.items()},
        "layers": _layers([summary["layers"] for summary in summaries]),
        "lost_per_event": statistics.fmean(lost) if lost else None,
        "epochs_to_recover": statistics.fmean(waits) if waits else None,
        "never_recovered": len(events) - len(waits),
        "event_epochs": [event["epoch"] for event in events],
    }


def _over_runs(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation}


def _layers(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Averages the rows of each layer over the runs."""
    keys = ("nodes", "weights", "nodes_percent", "weights_percent")
    return [
        {"name": rows[0]["name"], **{key: statistics.fmean(row[key] for row in rows) for key in keys}}
        for rows in zip(*runs, strict=True)
    ]
