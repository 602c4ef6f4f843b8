"""Least squares of a layer's outputs on its inputs, damped towards the weights it has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rlsprune.model.tensors import exact
from rlsprune.reconstruction.calibration import Reduction
from rlsprune.statistics.inverse import cholesky_positive

__all__ = ["DAMPING", "LeastSquares", "best_damping", "clipped_fit", "in_rows", "product_in_pieces"]

DAMPING = 1e-3
"""Of the mean square of the inputs, at least."""
_MORE = (1e-2, 1e-1, 1.0)  # what else is tried

MOST_INPUTS = 4608
"""With more inputs than this, or more inputs than rows, the problem is solved in the space of its rows."""


def product_in_pieces(rows: Tensor, values: Tensor, pieces: list[int]) -> Tensor:
    """``XᵀY``, ``(groups, n, outputs)``: each piece in its own precision, their sum in float64."""
    total = exact(rows.new_zeros(rows.shape[0], rows.shape[2], values.shape[2]))
    for own, value in zip(torch.split(rows, pieces, 1), torch.split(values, pieces, 1), strict=True):
        total += exact(own.mT @ value)
    return total


def in_rows(inputs: int, rows: int) -> bool:
    """Whether a problem of so many inputs and rows is solved in the space of its rows."""
    return inputs > min(rows, MOST_INPUTS)


class LeastSquares:
    """Solves for one X and many right-hand sides, batched over the groups of a layer.

    Minimises ``‖XW − Y‖²/m + δ‖W − W₀‖²``, in closed form: ``W₀ + (XᵀX/m + δI)⁻¹Xᵀ(Y − XW₀)/m``.

    Args:
        rows: X, ``(groups, m, n)``, or this rank's rows of it.
        start: W₀, ``(groups, n, outputs)``.
        damping: δ as a share of the mean of the diagonal of XᵀX/m.
        pieces: Numbers of rows that are summed in their own precision before they are added up in float64: sums of the
            same pieces are the same, on however many ranks. None for all at once.
        count: m, where other ranks have rows too.
        reduction: The ranks. In the space of rows, `rows` are those of all of them.
    """

    def __init__(
        self,
        rows: Tensor,
        start: Tensor,
        damping: float,
        *,
        pieces: Sequence[int] | None = None,
        count: int | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self.rows, self.start, self._damping = rows, start, damping
        self._pieces = [rows.shape[1]] if pieces is None else list(pieces)
        self._count = max(rows.shape[1] if count is None else count, 1)
        self._in_rows = in_rows(rows.shape[2], self._count)
        self._reduction = reduction or Reduction()

    def damped(self, damping: float) -> LeastSquares:
        """The same problem with another δ."""
        other = copy.copy(self)
        other.__dict__.pop("_factor", None)
        other._damping, other._square = damping, self._square
        return other

    @cached_property
    def _square(self) -> tuple[Tensor, Tensor]:
        """``XᵀX/m``, or ``XXᵀ/m``, and its diagonal."""
        if self._in_rows:
            square = exact(self.rows @ self.rows.mT)
        else:
            (square,) = self._reduction.sums(product_in_pieces(self.rows, self.rows, self._pieces))
        square.div_(self._count)
        return square, square.diagonal(dim1=-2, dim2=-1).clone()

    @cached_property
    def _factor(self) -> Tensor:
        square, diagonal = self._square
        mean_square = diagonal.sum(1) / self.rows.shape[2]  # in either space the same
        delta = (self._damping * mean_square).clamp_min(torch.finfo(torch.float32).tiny)
        square.diagonal(dim1=-2, dim2=-1).copy_(diagonal + delta[:, None])  # no copy of the largest matrix there is
        return cholesky_positive(square)

    def __call__(self, targets: Tensor) -> Tensor:
        """W for targets Y, ``(groups, m, outputs)``, in float64."""
        residual = targets - self.predicted(self.start)
        if self._in_rows:
            step = self._reduction.columns(self._solved, exact(residual) / self._count)
            return self.start + exact(self.rows.mT @ step.to(self.rows)).to(self.start.device)
        (right,) = self._reduction.sums(product_in_pieces(self.rows, residual, self._pieces))
        return self.start + self._reduction.columns(self._solved, right / self._count).to(self.start.device)

    def _solved(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right, self._factor)

    def predicted(self, weights: Tensor) -> Tensor:
        """X W."""
        return self.rows @ weights.to(self.rows)


def best_damping(error: Callable[[float], float], first: float) -> float:
    """The damping with the least error, which is to be that on inputs held back: more is tried as long as it helps."""
    best, least = first, error(first)
    for damping in _MORE:
        tried = error(damping)
        if not tried < least:
            break
        best, least = damping, tried
    return best


def clipped_fit(problem: LeastSquares, targets: Tensor, low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """The fit where outputs are clipped to an interval afterwards, as by a ReLU.

    Where the target is at or below ``low``, an output need only be below it too; the same above ``high``. That is a
    convex problem. Each round puts the present outputs, clipped, in place of such targets, and solves again: an upper
    bound of the error that touches it at the present weights, so that the error never grows.

    Args:
        problem: Of the layer.
        targets: Y, ``(groups, m, outputs)``.
        low: What outputs are clipped to from below, of a shape that broadcasts to the targets'; −∞ for nothing.
        high: The same from above.
        rounds: How often.
    """
    weights = problem(targets)
    below, above = targets <= low, targets >= high
    for _ in range(rounds):
        outputs = problem.predicted(weights)
        free = torch.where(
            below, torch.minimum(outputs, low), torch.where(above, torch.maximum(outputs, high), targets)
        )
        weights = problem(free)
    return weights
