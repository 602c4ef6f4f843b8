"""Least squares of a layer's outputs on its inputs, damped towards its present weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rlsprune.model.tensors import exact
from rlsprune.reconstruction.rows import Part
from rlsprune.statistics.inverse import cholesky_positive

__all__ = ["DAMPING", "LeastSquares", "best_damping", "clipped_fit", "product_in_pieces"]

DAMPING = 1e-3
"""The least damping, as a share of the mean square of the inputs."""
_MORE = (1e-2, 1e-1, 1.0)  # the other dampings that are tried

MOST_INPUTS = 4608
"""With more inputs than this, or more inputs than rows, the problem is solved in the space of its rows."""


def product_in_pieces(rows: Tensor, values: Tensor, pieces: list[int]) -> Tensor:
    """Computes ``XᵀY``, ``(groups, n, outputs)``: each piece in its own precision, their sum in float64."""
    total = exact(rows.new_zeros(rows.shape[0], rows.shape[2], values.shape[2]))
    for own, value in zip(torch.split(rows, pieces, 1), torch.split(values, pieces, 1), strict=True):
        total += exact(own.mT @ value)
    return total


class LeastSquares:
    """A least-squares problem for one X and many right-hand sides, batched over the groups of a layer.

    Minimises ``‖XW − Y‖²/m + δ‖W − W₀‖²``, in closed form: ``W₀ + (XᵀX/m + δI)⁻¹Xᵀ(Y − XW₀)/m``.

    Args:
        rows: X, ``(groups, m, n)``.
        start: W₀, ``(groups, n, outputs)``.
        damping: δ as a share of the mean of the diagonal of XᵀX/m.
        pieces: Numbers of rows that are summed in their own precision before they are added up in float64. None for all
            at once.
    """

    def __init__(self, rows: Tensor, start: Tensor, damping: float, *, pieces: Sequence[int] | None = None) -> None:
        self.rows, self.start, self._damping = rows, start, damping
        self._pieces = [rows.shape[1]] if pieces is None else list(pieces)
        self._count = max(rows.shape[1], 1)
        self._in_rows = rows.shape[2] > min(self._count, MOST_INPUTS)

    def damped(self, damping: float) -> LeastSquares:
        """Returns the same problem with another δ."""
        other = self.part(Part())
        other._damping = damping
        return other

    def part(self, part: Part) -> LeastSquares:
        """Returns the same problem for some of the groups and outputs."""
        square, diagonal = self._square
        other = copy.copy(self)
        other.__dict__.pop("_factor", None)
        other.rows, other.start = self.rows[part.groups], part.of(self.start)
        other._square = square[part.groups], diagonal[part.groups]
        return other

    @cached_property
    def _square(self) -> tuple[Tensor, Tensor]:
        """Computes ``XᵀX/m``, or ``XXᵀ/m``, and its diagonal."""
        if self._in_rows:
            square = exact(self.rows @ self.rows.mT)
        else:
            square = product_in_pieces(self.rows, self.rows, self._pieces)
        square.div_(self._count)
        return square, square.diagonal(dim1=-2, dim2=-1).clone()

    @cached_property
    def _factor(self) -> Tensor:
        square, diagonal = self._square
        mean_square = diagonal.sum(1) / self.rows.shape[2]  # the same in both spaces
        delta = (self._damping * mean_square).clamp_min(torch.finfo(torch.float32).tiny)
        square.diagonal(dim1=-2, dim2=-1).copy_(diagonal + delta[:, None])  # in place: it is the largest matrix
        return cholesky_positive(square)

    def __call__(self, targets: Tensor) -> Tensor:
        """Solves for W with targets Y, ``(groups, m, outputs)``, in float64."""
        residual = targets - self.predicted(self.start)
        if self._in_rows:
            step = torch.cholesky_solve(exact(residual) / self._count, self._factor)
            return self.start + exact(self.rows.mT @ step.to(self.rows)).to(self.start.device)
        right = product_in_pieces(self.rows, residual, self._pieces) / self._count
        return self.start + torch.cholesky_solve(right, self._factor).to(self.start.device)

    def predicted(self, weights: Tensor) -> Tensor:
        """Returns ``XW``."""
        return self.rows @ weights.to(self.rows)


def best_damping(error: Callable[[float], float], first: float) -> float:
    """Returns the damping with the least error, on inputs held back. Tries larger ones as long as they help."""
    best, least = first, error(first)
    for damping in _MORE:
        tried = error(damping)
        if not tried < least:
            break
        best, least = damping, tried
    return best


def clipped_fit(problem: LeastSquares, targets: Tensor, low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Fits outputs that are clipped to an interval afterwards, as by a ReLU.

    If a target is at or below ``low``, the output only has to be below it, too; the same holds above ``high``. That is
    a convex problem. Each round replaces such targets by the present outputs, clipped, and solves again. That minimises
    an upper bound of the error that touches it at the present weights, so the error never grows.

    Args:
        problem: The least-squares problem of the layer.
        targets: Y, ``(groups, m, outputs)``.
        low: Lower ends of the intervals, in a shape that broadcasts to that of the targets; −∞ for none.
        high: Upper ends of the intervals; ∞ for none.
        rounds: Number of rounds.
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
