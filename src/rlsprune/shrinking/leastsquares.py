"""Least squares of a layer's outputs on its inputs, damped towards the weights it has."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from rlsprune.model.tensors import exact
from rlsprune.statistics.inverse import cholesky_positive

__all__ = ["LeastSquares", "clipped_fit"]

MOST_INPUTS = 4608
"""With more inputs than this, or more inputs than rows, the problem is solved in the space of its rows."""


class LeastSquares:
    """Solves for one X and many right-hand sides, batched over the groups of a layer.

    Minimises ``‖XW − Y‖²/m + δ‖W − W₀‖²``, in closed form: ``W₀ + (XᵀX/m + δI)⁻¹Xᵀ(Y − XW₀)/m``.

    Args:
        rows: X, ``(groups, m, n)``.
        start: W₀, ``(groups, n, outputs)``.
        damping: δ as a share of the mean of the diagonal of XᵀX/m.
    """

    def __init__(self, rows: Tensor, start: Tensor, damping: float) -> None:
        self.rows, self.start = rows, start
        m = max(rows.shape[1], 1)
        self._in_rows = rows.shape[2] > min(m, MOST_INPUTS)
        mean_square = rows.square().mean((1, 2), dtype=torch.float64 if rows.device.type != "mps" else None)
        self._delta = exact(damping * mean_square).clamp_min(torch.finfo(torch.float32).tiny)

    @cached_property
    def _factor(self) -> Tensor:
        m = max(self.rows.shape[1], 1)
        square = self.rows @ self.rows.mT if self._in_rows else self.rows.mT @ self.rows
        square = exact(square).div_(m)
        square.diagonal(dim1=-2, dim2=-1).add_(self._delta[:, None])
        return cholesky_positive(square)

    def __call__(self, targets: Tensor) -> Tensor:
        """W for targets Y, ``(groups, m, outputs)``, in float64."""
        residual = targets - self.predicted(self.start)
        m = max(self.rows.shape[1], 1)
        if self._in_rows:
            step = torch.cholesky_solve(exact(residual) / m, self._factor)
            return self.start + exact(self.rows.mT @ step.to(self.rows)).to(self.start.device)
        right = exact(self.rows.mT @ residual) / m
        return self.start + torch.cholesky_solve(right, self._factor).to(self.start.device)

    def predicted(self, weights: Tensor) -> Tensor:
        """X W."""
        return self.rows @ weights.to(self.rows)


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
