"""The tasks of a network, and the scores of each. Light to import: no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["METRICS", "TASKS", "Metric", "find_metrics", "metric_of"]

TASKS = ("classification", "regression", "multi-label")
"""One class of several; numbers; any number of labels."""


@dataclass(frozen=True)
class Metric:
    """A score on the test split."""

    name: str
    """In files and on the command line."""
    label: str
    """In sentences."""
    tasks: tuple[str, ...]
    unit: str = " %"
    digits: int = 2
    higher_is_better: bool = True

    @property
    def worst(self) -> float:
        """The value of outputs that are not finite."""
        return 0.0 if self.unit else -math.inf if self.higher_is_better else math.inf

    def text(self, value: float | None) -> str:
        """A value as it is shown."""
        return "–" if value is None else f"{value:.{self.digits}f}{self.unit}"

    def points(self, drop: float) -> float:
        """So many points in the score's own unit: hundredths of R²."""
        return drop / 100 if self.name == "r2" else drop

    def at_least_as_good(self, value: float, other: float) -> bool:
        """Whether a value is no worse than another."""
        return value >= other if self.higher_is_better else value <= other


_CLASSES = ("classification", "multi-label")
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", _CLASSES),
        Metric("balanced-accuracy", "balanced accuracy", ("classification",)),
        Metric("f1", "F1", _CLASSES),
        Metric("auc", "AUC", _CLASSES),
        Metric("average-precision", "average precision", _CLASSES),
        Metric("r2", "R²", ("regression",), "", 4),
        Metric("mae", "mean absolute error", ("regression",), "", 4, higher_is_better=False),
        Metric("rmse", "root mean squared error", ("regression",), "", 4, higher_is_better=False),
    )
}
_DEFAULTS = {"classification": ("accuracy",), "regression": ("r2", "mae"), "multi-label": ("f1", "accuracy")}


def find_metrics(task: str, asked: str | None) -> tuple[Metric, ...]:
    """The scores that a run reports; the first one counts.

    Args:
        task: One of `TASKS`.
        asked: The name of the one that counts; None for the task's usual.

    Raises:
        ValueError: It is not of that task.
    """
    if asked is not None and task not in METRICS[asked].tasks:
        fitting = ", ".join(name for name, metric in METRICS.items() if task in metric.tasks)
        raise ValueError(f"--metric {asked} is not for {task}: choose one of {fitting}, or another --task")
    names = dict.fromkeys(([asked] if asked else []) + list(_DEFAULTS[task]))
    return tuple(METRICS[name] for name in names)


def metric_of(told: Mapping[str, Any]) -> Metric:
    """The score that counts in a run, of its config or its summary: accuracy, unless it says another."""
    return METRICS.get(str(told.get("metric")), METRICS["accuracy"])
