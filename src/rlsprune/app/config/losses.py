"""The losses of runs, by name. Light to import: torch is there when one is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOSSES", "cross_entropy", "mean_squared_error"]


def mean_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Eq. (15) on one-hot targets: half the squared error, summed over the outputs, averaged over the batch."""
    from torch.nn import functional as F  # noqa: N812

    targets = F.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)
    return (outputs - targets).square().sum() / (2 * len(outputs))


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over the batch."""
    from torch.nn import functional as F  # noqa: N812

    return F.cross_entropy(outputs, labels)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mean_squared_error,
    "cross-entropy": cross_entropy,
}
