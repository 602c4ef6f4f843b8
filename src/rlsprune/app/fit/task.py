"""The loss of a user's task, the weights of its classes, and a check that its scores can be computed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlsprune.app.config.fit import FitConfig
from rlsprune.app.config.losses import LOSSES, LOSSES_OF
from rlsprune.app.config.metrics import Metric
from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError
from rlsprune.model.arguments import quoted
from rlsprune.training.loop import Loss

__all__ = ["check_scorable", "class_weights", "find_loss"]

_NEED_EVERY_CLASS = ("auc", "average-precision")


def find_loss(config: FitConfig, data: Dataset) -> tuple[str, Loss]:
    """Returns the name of the requested or usual loss, and the loss itself with its class weights.

    Raises:
        ValueError: The loss is not for this task.
    """
    usual = LOSSES_OF[data.task]
    name = config.loss or usual[0]
    if name not in usual:
        raise ValueError(f"--loss {name} is not for {data.task}: choose one of {', '.join(usual)}, or another --task")
    if config.class_weights is None:
        return name, LOSSES[name]
    weights = class_weights(config.class_weights, data)
    return name, partial(LOSSES[name], weights=weights.to(data.train.labels.device))


def class_weights(asked: str, data: Dataset) -> Tensor:
    """Computes the weight of an example of each class; the examples of the training split weigh 1 on average.

    For several labels at once, it is the weight of a label that is present relative to one that is absent.

    Args:
        asked: ``"balanced"`` (every class weighs the same, however rare), or numbers in the order of the classes, or
            names of classes with numbers, as in ``"cat=2,dog=1"``.
        data: Data with the classes.

    Raises:
        ValueError: A class is unknown or has no weight, or a weight is not a positive number.
    """
    if data.task == "regression":
        raise ValueError("--class-weights weighs classes, and the targets are numbers: leave it out")
    labels = data.train.labels
    if data.task == "multi-label":
        there = labels.sum(0).clamp_min(1).cpu()
        return (len(labels) - there) / there if asked == "balanced" else _parsed(asked, data.classes)
    counts = torch.bincount(labels, minlength=len(data.classes)).cpu().float()
    weights = 1 / counts.clamp_min(1) if asked == "balanced" else _parsed(asked, data.classes)
    return weights * (counts.sum() / (weights * counts).sum())


def _parsed(asked: str, classes: tuple[str, ...]) -> Tensor:
    pairs = [part.rpartition("=") for part in asked.split(",")]
    names = [name.strip() for name, sign, _ in pairs if sign]
    expected = f"balanced, {len(classes)} numbers, or name=number for each of {quoted(classes)}"
    if sorted(names) != sorted(classes) and (names or len(pairs) != len(classes)):
        raise ValueError(f"--class-weights {asked} does not name each class once: give {expected}")
    try:
        numbers = [float(number) for _, _, number in pairs]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"--class-weights {asked} holds something other than numbers above 0: give {expected}")
    in_order = dict(zip(names or classes, numbers, strict=True))
    return torch.tensor([in_order[name] for name in classes])


def check_scorable(metrics: tuple[Metric, ...], data: Dataset, split: Split, what: str) -> None:
    """Raises DataError if a score needs both examples and non-examples of every class and the split lacks them."""
    asked = next((metric for metric in metrics if metric.name in _NEED_EVERY_CLASS), None)
    if asked is None:
        return
    labels = split.labels
    if data.task == "classification":
        found = torch.bincount(labels, minlength=len(data.classes)).cpu() > 0
    else:
        found = ((labels.amax(0) > 0) & (labels.amin(0) < 1)).cpu()
    missing = [name for name, there in zip(data.classes, found.tolist(), strict=True) if not there]
    if missing:
        raise DataError(
            data.name,
            f"{what} have no example of {quoted(missing)}, or no other example, and {asked.label} needs both",
            "Give more of them, or choose another --metric",
        )
