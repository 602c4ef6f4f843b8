"""The losses of runs, by name. Light to import: torch is there when one is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOSSES", "LOSSES_OF", "binary_cross_entropy", "cross_entropy", "huber", "mean_squared_error"]


def mean_squared_error(outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Eq. (15): half the squared error, summed over the outputs, averaged over the batch; of classes, one-hot.

    Args:
        outputs: ``(N, outputs)``; ``(N,)`` for one.
        labels: Numbers of classes, or floating-point targets ``(N, outputs)``.
        weights: Of the classes.
    """
    from torch.nn import functional as F  # noqa: N812

    if labels.is_floating_point():
        return (outputs.view_as(labels) - labels).square().sum() / (2 * len(outputs))
    errors = (outputs - F.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)).square()
    return (errors if weights is None else errors * weights[labels, None]).sum() / (2 * len(outputs))


def cross_entropy(outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over the batch; each example counts as its class weighs."""
    from torch.nn import functional as F  # noqa: N812

    if weights is None:
        return F.cross_entropy(outputs, labels)
    return (F.cross_entropy(outputs, labels, reduction="none") * weights[labels]).mean()


def huber(outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Squared error up to 1, linear beyond it: large errors count less."""
    from torch.nn import functional as F  # noqa: N812

    return F.huber_loss(outputs.view_as(labels), labels)


def binary_cross_entropy(outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over the batch and the labels; with weights, a label that is there counts so many times."""
    from torch.nn import functional as F  # noqa: N812

    return F.binary_cross_entropy_with_logits(outputs.view_as(labels), labels, pos_weight=weights)


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "mse": mean_squared_error,
    "cross-entropy": cross_entropy,
    "huber": huber,
    "bce": binary_cross_entropy,
}

LOSSES_OF = {"classification": ("cross-entropy", "mse"), "regression": ("mse", "huber"), "multi-label": ("bce",)}
"""By task, the usual one first."""
