"""The order in which the units of a group go, one after the other, and the cost of each further one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlsprune.model.tensors import sub_matrix
from rlsprune.statistics.inverse import Inverse, cholesky_positive

__all__ = ["Curve", "FixedScores", "Reader", "ReaderInRows", "UnitReader", "eliminate"]

_AT_ONCE = 64  # one unit in so many goes at a time
_ROUNDS_IN_ROWS = 8


class Curve(NamedTuple):
    """The order in which the units of one group go, and the costs."""

    order: list[int]
    """The units, first to go first; the last one stays."""
    costs: list[float]
    """For each number of removed units, from 0: the error of the layers that read them after the best refit. It is a
    share of the variance of their outputs, and counts less in layers where an input of the network has many places. It
    is measured on inputs that the refit did not see, if there are enough."""


class UnitReader(Protocol):
    """A layer that reads the units of a group."""

    error: float
    """The error of the layer without all units removed so far, after its refit."""

    @property
    def least_step(self) -> float:
        """Returns the least share of the remaining units to remove before scores are taken again."""

    def scores(self) -> Tensor:
        """Returns the cost of removing each unit now, on the CPU."""

    def remove(self, units: Tensor) -> None:
        """Removes these units, and refits the layer."""


class Reader:
    """A layer with few enough inputs for an autocorrelation matrix: optimal brain surgeon, by unit.

    With fewer samples than the layer has inputs, channels seem to replace each other although they do not.
    So A chooses the units and refits, and the error is measured on other inputs.

    Args:
        autocorrelation: A of the layer's inputs, damped, for each group of a grouped convolution: ``(groups, n, n)``.
        weights: The weights, ``(groups, n, outputs)``, with outputs scaled by the weight of their errors.
        rows: The indices of each unit's inputs: ``(groups, units, k)``.
        held_back: The autocorrelation of other inputs, not damped; None to measure the error by A.
    """

    least_step = 0.0

    def __init__(self, autocorrelation: Tensor, weights: Tensor, rows: Tensor, held_back: Tensor | None = None) -> None:
        self._rows = rows.to(autocorrelation.device)
        factor = cholesky_positive(autocorrelation)
        del autocorrelation  # one of the largest matrices in memory
        self._P = torch.cholesky_inverse(factor)
        del factor
        weights = weights.to(self._P)
        if weights.shape[2] > weights.shape[1]:  # only W Wᵀ matters
            weights = torch.linalg.qr(weights.mT, mode="r").R.mT
        self._W = weights.clone()
        self._B = held_back
        self._B_lost = torch.zeros_like(self._W)  # B times all that was subtracted from the weights
        self._left = torch.ones(self._P.shape[:2], dtype=torch.bool, device=self._P.device)
        self.error = 0.0

    def scores(self) -> Tensor:
        """Returns ``tr(P_dd⁻¹ W_d W_dᵀ)`` of each unit d; the values of removed units mean nothing."""
        total = torch.zeros(self._rows.shape[1], dtype=self._P.dtype, device=self._P.device)
        for P, W, rows in zip(self._P, self._W, self._rows, strict=True):
            blocks, own = P[rows[:, :, None], rows[:, None, :]], W[rows]
            square = own @ own.mT
            solved = square / blocks if rows.shape[1] == 1 else torch.linalg.solve_ex(blocks, square)[0]
            total += solved.diagonal(dim1=-2, dim2=-1).sum(-1)
        return total.cpu()

    def remove(self, units: Tensor) -> None:
        """Refits with ``W −= P_·d P_dd⁻¹ W_d``, and turns P into that of the inputs that stay."""
        for number, (P, W, rows, left) in enumerate(zip(self._P, self._W, self._rows, self._left, strict=True)):
            gone = rows[units.to(rows.device)].flatten()
            columns, own = P[:, gone], W[gone]
            factor = cholesky_positive(columns[gone])
            gain = torch.cholesky_solve(columns.mT, factor).mT  # P_·d P_dd⁻¹
            step = gain @ own
            if self._B is None:
                self.error += float((own * torch.cholesky_solve(own, factor)).sum())
            else:
                B_step = (self._B[number] @ gain) @ own
                self.error += float((step * (2 * self._B_lost[number] + B_step)).sum())
                self._B_lost[number] += B_step
            W.sub_(step)
            W[gone] = 0
            P.addmm_(gain, columns.mT, alpha=-1)
            P[gone] = 0
            P[:, gone] = 0
            # The block of a removed unit stays invertible, so that scores need not leave it out.
            P[gone, gone] = 1
            left[gone] = False
        if 2 * int(self._left[0].sum()) < self._P.shape[1]:
            self._forget()

    def _forget(self) -> None:
        """Drops the rows and columns of removed units from the matrices."""
        stay = [left.nonzero().flatten() for left in self._left]
        place = self._left.cumsum(1) - 1  # arbitrary for removed units
        self._rows = torch.stack([own[rows] for own, rows in zip(place.clamp_min(0), self._rows, strict=True)])
        self._P = torch.stack([sub_matrix(own, which) for own, which in zip(self._P, stay, strict=True)])
        if self._B is not None:
            self._B = torch.stack([sub_matrix(own, which) for own, which in zip(self._B, stay, strict=True)])
        self._W, self._B_lost = (
            torch.stack([own[which] for own, which in zip(matrix, stay, strict=True)])
            for matrix in (self._W, self._B_lost)
        )
        self._left = torch.ones(self._P.shape[:2], dtype=torch.bool, device=self._P.device)


class ReaderInRows:
    """A layer with too many inputs for that matrix: P is never formed, and a share of the units goes at a time.

    Args:
        P: P of the layer's inputs, from fewer rows than inputs.
        weights: The weights, ``(n, outputs)``, scaled as in `Reader`.
        index: The indices of each unit's inputs: ``(units, k)``.
        held_back: Other rows, ``(m, n)``, on which the error is measured.
    """

    least_step = 1 / _ROUNDS_IN_ROWS

    def __init__(self, P: Inverse, weights: Tensor, index: Tensor, held_back: Tensor) -> None:
        self._P, self._W, self._index, self._held_back = P, weights, index, held_back
        self._left = torch.arange(len(index))
        self._wanted = held_back @ weights.to(held_back)
        self.error = 0.0

    def scores(self) -> Tensor:
        """See `Reader`."""
        blocks = self._P.blocks(self._index)
        own = self._W.to(blocks)[self._index]
        scores = torch.zeros(int(self._left.max()) + 1, dtype=torch.float64)
        scores[self._left] = (own * torch.linalg.solve_ex(blocks, own)[0]).sum((1, 2)).cpu()
        return scores

    def remove(self, units: Tensor) -> None:
        """See `Reader`."""
        going = torch.isin(self._left, units)
        removal = self._P.without(self._index[going].flatten())
        place = torch.full((self._P.size,), -1).index_put((removal.stay,), torch.arange(len(removal.stay)))
        self._W, self._P = removal.refit(self._W), removal.left()
        self._index, self._left = place[self._index[~going]], self._left[~going]
        self._held_back = self._held_back[:, removal.stay.to(self._held_back.device)]
        missed = self._held_back @ self._W.to(self._held_back) - self._wanted
        self.error = float(missed.square().sum()) / len(missed)


class FixedScores:
    """A layer that cannot be refitted: the cost of a unit does not depend on the others.

    Args:
        scores: The cost of each unit.
    """

    least_step = 0.0

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores.double().cpu()
        self.error = 0.0

    def scores(self) -> Tensor:
        """Returns the scores as they were given."""
        return self._scores

    def remove(self, units: Tensor) -> None:
        """Adds the units' costs to the error, and refits nothing."""
        self.error += float(self._scores[units].sum())


def eliminate(readers: Sequence[UnitReader], size: int, name: str = "the group") -> Curve:
    """Removes the unit that costs its readers least, again and again, until one is left.

    Two channels that can replace each other each cost little while both are there, so scores are taken anew after each
    removal. If there are many units, several go at a time.

    Raises:
        ValueError: The scores are not finite, because weights or inputs of a reader are not finite.
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
                f"the scores of the channels of {name} are not finite: weights or inputs of the layers that read them "
                "are not finite, or overflow. Check the network and the batches"
            )
        scores[~alive] = torch.inf
        count = min(left - 1, max(1, left // _AT_ONCE, int(step * left)))
        worst = torch.sort(scores, stable=True).indices[:count]
        for reader in readers:
            reader.remove(worst)
        alive[worst] = False
        # Their cost together is known; it is shared out among them by their scores.
        shares = scores[worst].clamp_min(torch.finfo(torch.float64).tiny).cumsum(0)
        added = max(sum(reader.error for reader in readers) - costs[-1], 0.0)
        costs += (costs[-1] + added * shares / shares[-1]).tolist()
        order += worst.tolist()
    order.append(int(alive.nonzero()[0]))
    return Curve(order, costs)
