"""In which order the units of a group go, one after the other, and what each further one costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlsprune.model.tensors import sub_matrix
from rlsprune.statistics.inverse import Inverse, cholesky_positive

__all__ = ["Curve", "FixedScores", "Reader", "ReaderInRows", "UnitReader", "eliminate"]

_AT_ONCE = 64  # of so many units one goes at a time, of twice as many two
_ROUNDS_IN_ROWS = 8


class Curve(NamedTuple):
    """How one group can be cut."""

    order: list[int]
    """Units, the first to go first; the last one stays."""
    costs: list[float]
    """For each number of units that are gone, none first: the error of the layers that read them, after the best refit,
    as a share of the variance of their outputs."""


class UnitReader(Protocol):
    """A layer that reads the units of a group."""

    @property
    def least_step(self) -> float:
        """The share of the units that go between two looks at the scores, at least."""

    def scores(self) -> Tensor:
        """What removing each unit costs now, on the CPU."""

    def remove(self, units: Tensor) -> None:
        """These units are gone, and the layer is refitted."""


class Reader:
    """A layer with few enough inputs for a matrix of them: optimal brain surgeon, by unit.

    Args:
        autocorrelation: A of its inputs, damped, for each group of a grouped convolution: ``(groups, n, n)``.
        weights: ``(groups, n, outputs)``, the outputs scaled as their errors count.
        rows: Which inputs are each unit's: ``(groups, units, k)``.
    """

    least_step = 0.0

    def __init__(self, autocorrelation: Tensor, weights: Tensor, rows: Tensor) -> None:
        self._rows = rows.to(autocorrelation.device)
        factor = cholesky_positive(autocorrelation)
        del autocorrelation  # the largest matrices that there are: two at a time are enough
        self._P = torch.cholesky_inverse(factor)
        del factor
        weights = weights.to(self._P)
        # All that counts of the weights. It is as large as P, however many outputs there are.
        self._M = weights @ weights.mT
        self._left = torch.ones(self._P.shape[:2], dtype=torch.bool, device=self._P.device)

    def scores(self) -> Tensor:
        """``tr(P_dd⁻¹ W_d W_dᵀ)`` of each unit d; meaningless for those that are gone."""
        total = torch.zeros(self._rows.shape[1], dtype=self._P.dtype, device=self._P.device)
        for P, M, rows in zip(self._P, self._M, self._rows, strict=True):
            blocks, own = (matrix[rows[:, :, None], rows[:, None, :]] for matrix in (P, M))
            solved = own / blocks if rows.shape[1] == 1 else torch.linalg.solve_ex(blocks, own)[0]
            total += solved.diagonal(dim1=-2, dim2=-1).sum(-1)
        return total.cpu()

    def remove(self, units: Tensor) -> None:
        """``W −= P_·d P_dd⁻¹ W_d``, and P becomes that of the inputs that stay."""
        for P, M, rows, left in zip(self._P, self._M, self._rows, self._left, strict=True):
            gone = rows[units.to(rows.device)].flatten()
            columns = P[:, gone]
            factor = cholesky_positive(columns[gone])
            gain = torch.cholesky_solve(columns.mT, factor).mT  # P_·d P_dd⁻¹
            cross = M[:, gone] - gain @ (0.5 * M[gone][:, gone])
            M.addmm_(cross, gain.mT, alpha=-1)
            M.addmm_(gain, cross.mT, alpha=-1)
            P.addmm_(gain, columns.mT, alpha=-1)
            for matrix in (M, P):
                matrix[gone] = 0
                matrix[:, gone] = 0
            # A unit that is gone has a block that can be solved with, so that scores need not leave it out.
            P[gone, gone] = 1
            left[gone] = False
        if 2 * int(self._left[0].sum()) < self._P.shape[1]:
            self._forget()

    def _forget(self) -> None:
        """Drops what is gone from the matrices."""
        stay = [left.nonzero().flatten() for left in self._left]
        place = self._left.cumsum(1) - 1  # of a unit that is gone: any
        self._rows = torch.stack([own[rows] for own, rows in zip(place.clamp_min(0), self._rows, strict=True)])
        self._P, self._M = (
            torch.stack([sub_matrix(own, which) for own, which in zip(matrix, stay, strict=True)])
            for matrix in (self._P, self._M)
        )
        self._left = torch.ones(self._P.shape[:2], dtype=torch.bool, device=self._P.device)


class ReaderInRows:
    """A layer with too many inputs for that: P is never made, a share of the units goes at a time.

    Args:
        P: Of its inputs, from fewer rows than inputs.
        weights: ``(n, outputs)``, scaled.
        index: Which inputs are each unit's: ``(units, k)``.
    """

    least_step = 1 / _ROUNDS_IN_ROWS

    def __init__(self, P: Inverse, weights: Tensor, index: Tensor) -> None:
        self._P, self._W, self._index = P, weights, index
        self._left = torch.arange(len(index))

    def scores(self) -> Tensor:
        """As of `Reader`."""
        blocks = self._P.blocks(self._index)
        own = self._W.to(blocks)[self._index]
        scores = torch.zeros(int(self._left.max()) + 1, dtype=torch.float64)
        scores[self._left] = (own * torch.linalg.solve_ex(blocks, own)[0]).sum((1, 2)).cpu()
        return scores

    def remove(self, units: Tensor) -> None:
        """As of `Reader`."""
        going = torch.isin(self._left, units)
        removal = self._P.without(self._index[going].flatten())
        place = torch.full((self._P.size,), -1).index_put((removal.stay,), torch.arange(len(removal.stay)))
        self._W, self._P = removal.refit(self._W), removal.left()
        self._index, self._left = place[self._index[~going]], self._left[~going]


class FixedScores:
    """A layer that cannot be refitted: what a unit costs does not depend on the others.

    Args:
        scores: Of each unit.
    """

    least_step = 0.0

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores.double().cpu()

    def scores(self) -> Tensor:
        """As they were given."""
        return self._scores

    def remove(self, units: Tensor) -> None:
        """Nothing is refitted."""


def eliminate(readers: Sequence[UnitReader], size: int, name: str = "the group") -> Curve:
    """Removes the unit that costs its readers least, again and again, until one is left.

    Of two channels that stand in for each other, each costs little as long as the other is there: so scores are taken
    anew after each removal. Of many units several go at a time.

    Raises:
        ValueError: The costs are no numbers, as weights or inputs of a reader are not finite.
    """
    alive = torch.ones(size, dtype=torch.bool)
    order: list[int] = []
    costs = [0.0]
    step = max((reader.least_step for reader in readers), default=0.0)
    while (left := int(alive.sum())) > 1:
        scores = torch.zeros(size, dtype=torch.float64)
        for reader in readers:
            own = reader.scores()
            scores[: len(own)] += own
        if not bool(scores[alive].isfinite().all()):
            raise ValueError(
                f"what the channels of {name} are worth is not finite: weights or inputs of the layers that read them "
                "are not, or overflow. Check the network and the batches"
            )
        scores[~alive] = torch.inf
        count = min(left - 1, max(1, left // _AT_ONCE, int(step * left)))
        worst = torch.sort(scores, stable=True).indices[:count]
        for unit in worst.tolist():
            order.append(unit)
            costs.append(costs[-1] + max(float(scores[unit]), 0.0))
        alive[worst] = False
        if left - count > 1:
            for reader in readers:
                reader.remove(worst)
    order.append(int(alive.nonzero()[0]))
    return Curve(order, costs)
