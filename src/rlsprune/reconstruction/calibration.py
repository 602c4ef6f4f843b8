"""The inputs that a network is calibrated on: who has them, which rows of a layer they give, and sums over all of them.

Several ranks have a share of the inputs each. Every input has a number, which says all that is drawn of it. So the rows
of all ranks together are those that one process would have with all the inputs, however these are divided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rlsprune.distributed.ranks import Ranks
from rlsprune.graph.sites import Site
from rlsprune.model.calls import ExampleInputs, batch_size
from rlsprune.model.tensors import exact
from rlsprune.reconstruction.replay import Stop
from rlsprune.training.batches import Sample, split

__all__ = ["Calibration", "Lanes", "Reduction", "gather_rows", "rows_drawn"]

T = TypeVar("T")

# Rows of a layer: so many times its inputs or the second number, whichever is more, while they stay below so many
# entries in all.
_ROWS_PER_INPUT, _LEAST_ROWS, _MOST_ENTRIES = 8, 16384, 2**25
# Bytes that the activations of one network may take while all its forwards wait at a layer.
_LIVE_BYTES = 2**27
# Inputs that run together: at most so many, and fewer if one has more entries than the second number over them.
_PIECE, _PIECE_ENTRIES = 128, 2**21
_HELD_BACK = 5  # every so many-th input is not fitted to, on average
_HELD_SEED = -1


class Reduction:
    """What ranks do together with what each has found on its inputs; alone, there is nothing to do.

    Args:
        ranks: The processes, or None.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def sums(self, *parts: Tensor) -> list[Tensor]:
        """Each tensor summed over the ranks, in float64: one message."""
        wide = [exact(part) for part in parts]
        if self.ranks is None:
            return wide
        flat = torch.cat([part.to(wide[0].device).reshape(-1) for part in wide])
        self.ranks.sum_(flat)
        pieces = torch.split(flat, [part.numel() for part in wide])
        return [piece.view(part.shape) for piece, part in zip(pieces, wide, strict=True)]

    def stacked(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape, in their order: one message."""
        return tensor[None] if self.ranks is None else self.ranks.stacked(tensor)

    def rows(self, rows: Tensor) -> Tensor:
        """The rows, ``(groups, m, n)``, of all ranks."""
        gathered = rows if self.ranks is None else self.ranks.gather_rows(rows, dim=1)
        assert gathered is not None
        return gathered

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        return [value] if self.ranks is None else self.ranks.gather(value)

    def mean(self, value: float) -> float:
        """Over the ranks."""
        return math.fsum(self.gather(value)) / self.size

    def by_first(self, compute: Callable[[], T]) -> T:
        """What rank 0 computes, on all ranks."""
        if self.ranks is None:
            return compute()
        return self.ranks.first(compute() if self.rank == 0 else None)  # type: ignore[return-value]

    def agree(self, what: str, value: object) -> None:
        """Stops every rank if their values differ."""
        if self.ranks is not None:
            self.ranks.agree(what, value)

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Tensors become rank 0's, in place."""
        if self.ranks is not None and tensors:
            self.ranks.exchange([tensors])


class Lanes(NamedTuple):
    """Pieces of the inputs that wait at a layer together."""

    own: int
    """How many, on this rank: at least one, which knows the shapes."""
    counted: int
    """Of how many rows are drawn: of none, if other ranks have all that one process would have there."""
    inputs: int
    """How many inputs these hold, on all ranks."""


class Calibration:
    """Inputs to calibrate on, in pieces that a network can take.

    Args:
        calls: This rank's pieces, at least one.
        sizes: Inputs in each.
        numbers: Of the inputs of each piece, among those of all ranks; None to count them.
        ranks: The processes that have a share each, or None.
    """

    def __init__(
        self,
        calls: Sequence[ExampleInputs],
        sizes: Sequence[int],
        numbers: Sequence[Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.calls, self.sizes, self.reduction = calls, sizes, Reduction(ranks)
        self._numbers = torch.split(torch.arange(sum(sizes)), list(sizes)) if numbers is None else numbers
        own = [(int(number[0]), size) for number, size in zip(self._numbers, sizes, strict=True)]
        self.pieces = self.reduction.gather(own)
        """Of each rank: the first number and the size of its pieces."""
        self._inputs = sum(size for pieces in self.pieces for _, size in pieces)

    @classmethod
    def of(cls, sample: Sample, ranks: Ranks | None = None) -> Calibration:
        """The inputs of a sample, in pieces that many forwards can hold."""
        calls: list[ExampleInputs] = []
        numbers: list[Tensor] = []
        for (inputs, _), own in zip(*sample, strict=True):
            entries = sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            each = max(1, entries // max(batch_size(inputs), 1))
            size = max(1, min(_PIECE, _PIECE_ENTRIES // each))
            calls += split(inputs, size)
            numbers += torch.split(own, size)
        return cls(calls, [batch_size(call) for call in calls], numbers, ranks)

    def lanes(self, sites: Mapping[tuple[str, int], Site]) -> dict[tuple[str, int], Lanes]:
        """How many of the pieces can wait at each site together; never fewer at a later site."""
        order = [rank for _, rank in sorted((n, rank) for rank, own in enumerate(self.pieces) for n, _ in own)]
        largest = max(size for own in self.pieces for _, size in own)

        @cache
        def divided(together: int) -> Lanes:
            counts = Counter(order[:together])
            inputs = sum(size for rank, own in enumerate(self.pieces) for _, size in own[: counts[rank]])
            counted = counts[self.reduction.rank]
            return Lanes(max(1, counted), counted, inputs)

        result: dict[tuple[str, int], Lanes] = {}
        together = len(order)
        for key, site in reversed(list(sites.items())):
            taken = 3 * 4 * site.size * largest
            together = max(1, min(together, _LIVE_BYTES // max(taken, 1)))
            result[key] = divided(together)
        return result

    def draw(self, stops: Sequence[Stop], seed: int, lanes: Lanes, rows: int | None = None) -> list[Tensor]:
        """Places of a layer's output to work with, of each piece; the same again for the same seed.

        Args:
            stops: Where the pieces wait.
            seed: Of the layer.
            lanes: Of the layer. Equally many rows are drawn of each input.
            rows: How many in all; None for what suits the width of the layer.
        """
        product = stops[0].product
        rows = rows_drawn(product.width + 1, product.groups) if rows is None else rows
        each = math.ceil(rows / max(lanes.inputs, 1))
        drawn = [
            _drawn(stop, own, each, seed) for stop, own in zip(stops[: lanes.counted], self._numbers, strict=False)
        ]
        return drawn + [torch.arange(0)] * (len(stops) - len(drawn))

    def split(self, stops: Sequence[Stop], places: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Places to fit to, and those of other inputs, a fifth, that tell whether the fit is better.

        Of few inputs, some places of each are held back.
        """
        fitted, held = [], []
        for stop, numbers, where in zip(stops, self._numbers, places, strict=False):
            each = _places_each(stop, numbers)
            keys = numbers[(where // each).clamp_max(len(numbers) - 1)]
            if self._inputs < 4 * _HELD_BACK:
                keys = 65537 * keys + where % each
            back = _uniform(_HELD_SEED, keys, 1)[:, 0] < 1 / _HELD_BACK
            fitted.append(where[~back])
            held.append(where[back])
        return fitted, held


def rows_drawn(inputs: int, groups: int = 1) -> int:
    """Rows that are drawn of a layer with so many inputs in each group, on all ranks together."""
    most = _MOST_ENTRIES // (inputs * groups)
    return min(max(_ROWS_PER_INPUT * inputs, min(_LEAST_ROWS, most)), max(most, 64))


def gather_rows(stops: Sequence[Stop], places: Sequence[Tensor], shifted: bool) -> Tensor:
    """The drawn rows of a layer's inputs, ``(groups, m, n)``; with a last 1 for a shift of its outputs, if wanted."""
    first = stops[0].product
    counts = [len(where) for where in places]
    dtype = torch.promote_types(first.inputs.dtype, torch.float32)
    # One tensor from the start: a copy of it would be the largest there is.
    rows = torch.ones(first.groups, sum(counts), first.width + shifted, dtype=dtype, device=first.inputs.device)
    start = 0
    for stop, where, count in zip(stops, places, counts, strict=True):
        rows[:, start : start + count, : first.width] = stop.product.rows(where)
        start += count
    return rows


def _places_each(stop: Stop, numbers: Tensor) -> int:
    """Places of the output that belong to one input."""
    return max(1, stop.product.places // len(numbers))


def _drawn(stop: Stop, numbers: Tensor, count: int, seed: int) -> Tensor:
    """At most ``count`` places of each input, ascending; all where there are no more."""
    counted, each = stop.places(), _places_each(stop, numbers)
    if counted is None and each <= count:
        return torch.arange(stop.product.places)
    if counted is None:
        counts = torch.full_like(numbers, each)
    else:
        owner = (counted // each).clamp_max(len(numbers) - 1)
        counts = torch.bincount(owner, minlength=len(numbers))
    starts = counts.cumsum(0) - counts
    picks = starts[:, None] + (_uniform(seed, numbers, count) * counts[:, None]).long()
    if counted is None:
        distinct: Tensor = torch.unique(picks)
        return distinct
    chosen = (counts <= count)[owner]
    chosen[picks[counts > 0].flatten()] = True
    return counted[chosen]


def _uniform(seed: int, keys: Tensor, count: int) -> Tensor:
    """``count`` numbers in [0, 1) for each key, ``(keys, count)``: always the same ones."""
    streams = _mixed(keys + _mixed(torch.tensor(seed)))
    return _mixed(streams[:, None] + 0x9E3779B9 * torch.arange(1, count + 1)).double() / 2**32


def _mixed(keys: Tensor) -> Tensor:
    """Whole numbers whose lower 32 bits are mixed until neighbours have nothing in common."""
    keys = keys & 0xFFFFFFFF
    for _ in range(2):
        keys = ((keys ^ (keys >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return keys ^ (keys >> 16)
