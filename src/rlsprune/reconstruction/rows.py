"""Rows of a layer's inputs with their targets: a rank's own, or those of all ranks.

The refit of a layer takes three messages, however often it is solved: a few numbers, the rows, and the solution. With
the rows of all ranks, every rank solves for some of the outputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlsprune.model.tensors import exact
from rlsprune.reconstruction.calibration import Calibration

__all__ = ["FitRows", "Part", "count_rows", "gather_all"]


class Part(NamedTuple):
    """Some of a layer's groups, and some of the outputs of each."""

    groups: slice = slice(None)
    outputs: slice = slice(None)

    def of(self, weight: Tensor) -> Tensor:
        """Returns this part of a tensor ``(groups, …, outputs)``."""
        return weight[self.groups, ..., self.outputs]

    @classmethod
    def sampled(cls, groups: int, outputs: int, most: int) -> Part:
        """Samples all groups and evenly spaced outputs: about ``most`` in all, at least one of each group."""
        return cls(outputs=slice(None, None, -(-outputs // max(1, most // groups))))

    @classmethod
    def share(cls, groups: int, outputs: int, rank: int, size: int) -> Part:
        """Returns the part that one of several ranks solves for."""
        if groups >= size:
            return cls(groups=slice(groups * rank // size, groups * (rank + 1) // size))
        return cls(outputs=slice(outputs * rank // size, outputs * (rank + 1) // size))


class FitRows(NamedTuple):
    """Some rows of a layer's inputs and their targets, by groups: ``(groups, m, …)``."""

    inputs: Tensor
    """The inputs, with a last 1 if the outputs can be shifted."""
    targets: Tensor
    low: Tensor | None
    """Lower ends to which outputs are clipped, for each row, or for all of them ``(groups, 1, …)``; None for none."""
    high: Tensor | None
    pieces: list[int]
    """Number of rows of each piece of the inputs."""
    ends_by_row: bool = False
    """Whether every row has its own ends."""

    def clipped(self, outputs: Tensor) -> Tensor:
        """Clips outputs."""
        return outputs if self.low is None or self.high is None else outputs.clamp(self.low, self.high)

    def errors(self, weight: Tensor) -> Tensor:
        """Returns the sum of the squared errors of the clipped outputs."""
        outputs = self.clipped(self.inputs @ weight.to(self.inputs))
        return exact((outputs - self.clipped(self.targets)).square().sum())

    def part(self, part: Part) -> FitRows:
        """Returns the rows of some of the groups and outputs."""
        low, high = (None if end is None else part.of(end) for end in (self.low, self.high))
        return self._replace(inputs=self.inputs[part.groups], targets=part.of(self.targets), low=low, high=high)

    def records(self) -> Tensor:
        """Packs all values of each row into a record, ``(m, …)``."""
        return torch.cat([tensor.movedim(0, 1).flatten(1) for tensor in self._by_row()], dim=1)

    def of_records(self, pieces: Sequence[Tensor]) -> FitRows:
        """Unpacks rows like these from the records of each piece."""
        columns: list[Tensor] = []
        for tensor in self._by_row():
            shape = (tensor.shape[0], tensor.shape[2])
            start = sum(own.shape[0] * own.shape[2] for own in columns)
            parts = [piece[:, start : start + math.prod(shape)].reshape(len(piece), *shape) for piece in pieces]
            columns.append(torch.cat([part.movedim(1, 0) for part in parts], dim=1))
        inputs, targets, *ends = columns
        low, high = ends or (self.low, self.high)
        return FitRows(inputs, targets, low, high, [len(piece) for piece in pieces], self.ends_by_row)

    def _by_row(self) -> list[Tensor]:
        """Returns the tensors that differ from row to row."""
        ends = (self.low, self.high) if self.ends_by_row else ()
        return [self.inputs, self.targets, *(end for end in ends if end is not None)]


def count_rows(batches: Calibration, kinds: Sequence[FitRows], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the rows of each kind in every piece of every rank, ``(ranks, kinds, pieces)``, and sums ``numbers``.

    Sends one message.
    """
    most = max(len(pieces) for pieces in batches.pieces)
    counts = numbers.new_zeros(len(kinds), most)
    for own, rows in zip(counts, kinds, strict=True):
        own[: len(rows.pieces)] = numbers.new_tensor(rows.pieces)
    everyone = batches.reduction.stacked(torch.cat([numbers, counts.flatten()]))
    counted = everyone[:, len(numbers) :].long().cpu().view(-1, len(kinds), most)
    return counted, everyone[:, : len(numbers)].sum(0)


def gather_all(batches: Calibration, kinds: Sequence[FitRows], counts: Tensor) -> list[FitRows]:
    """Gathers the rows of all ranks, of each kind, in the order in which one process would have them.

    Sends one message, or none for one process.

    Args:
        batches: The inputs.
        kinds: This rank's rows of each kind.
        counts: Number of rows of every piece, from `count_rows`.
    """
    if batches.reduction.size == 1:
        return list(kinds)
    own = torch.cat([rows.records() for rows in kinds])
    longest = int(counts.sum((1, 2)).max())
    everyone = batches.reduction.stacked(torch.cat([own, own.new_zeros(longest - len(own), own.shape[1])]))
    pieces = [
        torch.split(records[: int(count.sum())], count.flatten().tolist())
        for records, count in zip(everyone, counts, strict=True)
    ]
    order = sorted(
        (first, rank, piece) for rank, own in enumerate(batches.pieces) for piece, (first, _) in enumerate(own)
    )
    each = counts.shape[2]
    return [
        rows.of_records([pieces[rank][kind * each + piece] for _, rank, piece in order])
        for kind, rows in enumerate(kinds)
    ]
