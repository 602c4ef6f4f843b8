"""The quality of a network on a split: its loss, and scores that scikit-learn computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlsprune.app.config.metrics import METRICS, Metric
from rlsprune.app.data.labels import Array
from rlsprune.app.run.share import Share
from rlsprune.model.modes import evaluating
from rlsprune.training.loop import Batch, Evaluation, Loss, evaluation_sums

__all__ = ["Scored", "Scoring"]

_ALONE = Share()


class Scored(NamedTuple):
    """The loss and scores of a network on a split."""

    loss: float
    scores: Mapping[str, float]
    """The scores by the names of their metrics."""


@dataclass(frozen=True)
class Scoring:
    """Computes the loss and scores of a network.

    Args:
        task: One of `TASKS`.
        metrics: The metrics, the one that counts first.
        in_users_unit: Function that converts the network's outputs and targets to the user's unit.
    """

    task: str = "classification"
    metrics: tuple[Metric, ...] = (METRICS["accuracy"],)
    in_users_unit: Callable[[Tensor], Tensor] = lambda values: values

    @property
    def metric(self) -> Metric:
        """Returns the metric that counts."""
        return self.metrics[0]

    @property
    def loss_alone(self) -> Scoring:
        """Returns a scoring without metrics, because not every split has every class."""
        return replace(self, metrics=())

    def __call__(self, network: nn.Module, batches: Iterable[Batch], loss: Loss, share: Share = _ALONE) -> Scored:
        """Computes loss and scores in evaluation mode; each of several processes evaluates its share of the batches."""
        if self.task == "classification" and set(self.metrics) <= {METRICS["accuracy"]}:  # sums: no output is kept
            result = Evaluation.of_sums(*share.totals(list(evaluation_sums(network, share.of_batches(batches), loss))))
            return Scored(result.loss, {metric.name: result.accuracy for metric in self.metrics})
        losses: list[float] = []
        kept: list[tuple[Array, Array]] = []
        with evaluating(network):
            for inputs, labels in share.of_batches(batches):
                outputs = network(inputs)
                losses.append(float(loss(outputs, labels)) * len(labels))
                if self.task == "regression":
                    outputs, labels = (self.in_users_unit(values) for values in (outputs.view_as(labels), labels))
                kept.append((outputs.cpu().double().numpy(), labels.cpu().numpy()))
        found = [np.concatenate(column) for column in zip(*share.gathered(kept), strict=True)]
        total, count = share.totals([sum(losses)])[0], len(found[1])
        return Scored(total / count, {metric.name: self._score(metric, *found) for metric in self.metrics})

    def _score(self, metric: Metric, outputs: Array, labels: Array) -> float:
        if not np.isfinite(outputs).all():  # the guard reports the fault
            return metric.worst
        kind = self.task if self.task != "classification" else "binary" if outputs.shape[1] == 2 else "classes"
        value = float(_BY_KIND[kind][metric.name](outputs, labels))
        return value if metric.unit == "" else 100 * value


def _of(name: str, **options: Any) -> Callable[[Array, Array], float]:
    """Wraps a function of `sklearn.metrics` that is imported when it is called."""

    def score(given: Array, labels: Array) -> float:
        from sklearn import metrics

        with warnings.catch_warnings():  # about classes without examples in a split
            warnings.simplefilter("ignore", UserWarning)
            return float(getattr(metrics, name)(labels, given, **options))

    return score


def _after(
    prepare: Callable[[Array], Array], score: Callable[[Array, Array], float]
) -> Callable[[Array, Array], float]:
    return lambda outputs, labels: score(prepare(outputs), labels)


def _chosen(outputs: Array) -> Array:
    chosen: Array = outputs.argmax(-1)
    return chosen


def _difference(outputs: Array) -> Array:
    difference: Array = outputs[:, 1] - outputs[:, 0]
    return difference


def _present(outputs: Array) -> Array:
    return (outputs > 0).astype(int)


def _probabilities(outputs: Array) -> Array:
    return torch.from_numpy(outputs).softmax(-1).numpy()


def _labels_right(given: Array, labels: Array) -> float:
    return float((given == labels).mean())


_accuracy, _balanced = _after(_chosen, _of("accuracy_score")), _after(_chosen, _of("balanced_accuracy_score"))

_BY_KIND: Mapping[str, Mapping[str, Callable[[Array, Array], float]]] = {
    "binary": {
        "accuracy": _accuracy,
        "balanced-accuracy": _balanced,
        "f1": _after(_chosen, _of("f1_score", zero_division=0)),
        "auc": _after(_difference, _of("roc_auc_score")),
        "average-precision": _after(_difference, _of("average_precision_score")),
    },
    "classes": {
        "accuracy": _accuracy,
        "balanced-accuracy": _balanced,
        "f1": _after(_chosen, _of("f1_score", average="macro", zero_division=0)),
        "auc": _after(_probabilities, _of("roc_auc_score", multi_class="ovr")),
        "average-precision": _after(_probabilities, _of("average_precision_score")),
    },
    "multi-label": {
        "accuracy": _after(_present, _labels_right),
        "f1": _after(_present, _of("f1_score", average="macro", zero_division=0)),
        "auc": _of("roc_auc_score"),
        "average-precision": _of("average_precision_score"),
    },
    "regression": {
        "r2": _of("r2_score"),
        "mae": _of("mean_absolute_error"),
        "rmse": _of("root_mean_squared_error"),
    },
}
