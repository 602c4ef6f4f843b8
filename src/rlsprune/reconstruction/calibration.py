"""The inputs that a network is calibrated on: their division over ranks, the rows drawn of them, and sums over them.

Each of several ranks has a share of the inputs. Every input has a number, which determines all that is drawn of it. So
the rows of all ranks together are those that one process would draw of all inputs, however these are divided.
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

# Rows drawn of a layer: so many times its inputs, or the second number if that is more, but at most so many entries.
_ROWS_PER_INPUT, _LEAST_ROWS, _MOST_ENTRIES = 8, 16384, 2**25
# Bytes that the activations of one network may take while all its forwards wait at a layer.
_LIVE_BYTES = 2**27
# Inputs that run together: at most so many, and fewer if they would have more entries than the second number in all.
_PIECE, _PIECE_ENTRIES = 128, 2**21
_HELD_BACK = 5  # one input in so many is held back from the fit, on average
_HELD_SEED = -1


class Reduction:
    """Sums and exchanges of the ranks' results on their own inputs. A single process keeps its own.

    Args:
        ranks: The processes, or None.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def sums(self, *parts: Tensor) -> list[Tensor]:
        """Returns each tensor summed over the ranks, in float64. Sends one message."""
        wide = [exact(part) for part in parts]
        if self.ranks is None:
            return wide
        flat = torch.cat([part.to(wide[0].device).reshape(-1) for part in wide])
        self.ranks.sum_(flat)
        pieces = torch.split(flat, [part.numel() for part in wide])
        return [piece.view(part.shape) for piece, part in zip(pieces, wide, strict=True)]

    def stacked(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, of one shape, in the order of the ranks. Sends one message."""
        return tensor[None] if self.ranks is None else self.ranks.stacked(tensor)

    def rows(self, rows: Tensor) -> Tensor:
        """Returns the rows, ``(groups, m, n)``, of all ranks."""
        gathered = rows if self.ranks is None else self.ranks.gather_rows(rows, dim=1)
        assert gathered is not None
        return gathered

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, in the order of the ranks."""
        return [value] if self.ranks is None else self.ranks.gather(value)

    def mean(self, value: float) -> float:
        """Returns the mean of a value over the ranks."""
        return math.fsum(self.gather(value)) / self.size

    def by_first(self, compute: Callable[[], T]) -> T:
        """Computes a value on rank 0, and returns it on all ranks."""
        if self.ranks is None:
            return compute()
        return self.ranks.first(compute() if self.rank == 0 else None)  # type: ignore[return-value]

    def agree(self, what: str, value: object) -> None:
        """Raises on every rank if their values differ."""
        if self.ranks is not None:
            self.ranks.agree(what, value)

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts rank 0's tensors, in place."""
        if self.ranks is not None and tensors:
            self.ranks.exchange([tensors])


class Lanes(NamedTuple):
    """Pieces of the inputs that wait at a layer together."""

    own: int
    """Number of pieces on this rank; at least one, which knows the shapes."""
    counted: int
    """Number of this rank's pieces to draw rows of; 0 if other ranks have all pieces that one process would use."""
    inputs: int
    """Number of inputs in the counted pieces of all ranks."""


class Calibration:
    """Inputs to calibrate on, in pieces that a network can take.

    Args:
        calls: This rank's pieces, at least one.
        sizes: Number of inputs in each piece.
        numbers: Numbers of each piece's inputs among those of all ranks; None to count them.
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
        """For each rank, the first number and the size of each of its pieces."""
        self._inputs = sum(size for pieces in self.pieces for _, size in pieces)

    @classmethod
    def of(cls, sample: Sample, ranks: Ranks | None = None) -> Calibration:
        """Makes a calibration of a sample's inputs, in pieces small enough for many forwards at a time."""
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
        """Computes how many of the pieces can wait at each site together; never fewer at a later site."""
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
        """Draws places of a layer's output, for each piece; always the same for the same seed.

        Args:
            stops: Stops at which the pieces wait.
            seed: Seed of the layer.
            lanes: Lanes of the layer. Equally many rows are drawn of each input.
            rows: Number of rows in all; None for a number that suits the width of the layer.
        """
        product = stops[0].product
        rows = rows_drawn(product.width + 1, product.groups) if rows is None else rows
        each = math.ceil(rows / max(lanes.inputs, 1))
        drawn = [
            _drawn(stop, own, each, seed) for stop, own in zip(stops[: lanes.counted], self._numbers, strict=False)
        ]
        return drawn + [torch.arange(0)] * (len(stops) - len(drawn))

    def split(self, stops: Sequence[Stop], places: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Splits places into those to fit to, and those of other inputs, a fifth, that are held back to judge the fit.

        If there are few inputs, some places of each are held back.
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
    """Returns the number of rows drawn of a layer with so many inputs in each group, on all ranks together."""
    most = _MOST_ENTRIES // (inputs * groups)
    return min(max(_ROWS_PER_INPUT * inputs, min(_LEAST_ROWS, most)), max(most, 64))


def gather_rows(stops: Sequence[Stop], places: Sequence[Tensor], shifted: bool) -> Tensor:
    """Returns the drawn rows of a layer's inputs, ``(groups, m, n)``, if ``shifted`` with a last 1 for a shift."""
    first = stops[0].product
    counts = [len(where) for where in places]
    dtype = torch.promote_types(first.inputs.dtype, torch.float32)
    # One tensor from the start, because a copy of it would be the largest tensor of all.
    rows = torch.ones(first.groups, sum(counts), first.width + shifted, dtype=dtype, device=first.inputs.device)
    start = 0
    for stop, where, count in zip(stops, places, counts, strict=True):
        rows[:, start : start + count, : first.width] = stop.product.rows(where)
        start += count
    return rows


def _places_each(stop: Stop, numbers: Tensor) -> int:
    """Returns the number of places of the output that belong to one input."""
    return max(1, stop.product.places // len(numbers))


def _drawn(stop: Stop, numbers: Tensor, count: int, seed: int) -> Tensor:
    """Draws at most ``count`` places of each input, ascending; all places of inputs that have no more."""
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
    """Returns ``count`` pseudo-random numbers in [0, 1) for each key, ``(keys, count)``, always the same ones."""
    streams = _mixed(keys + _mixed(torch.tensor(seed)))
    return _mixed(streams[:, None] + 0x9E3779B9 * torch.arange(1, count + 1)).double() / 2**32


def _mixed(keys: Tensor) -> Tensor:
    """Mixes the lower 32 bits of integers, so that the results of neighbours are unrelated."""
    keys = keys & 0xFFFFFFFF
    for _ in range(2):
        keys = ((keys ^ (keys >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return keys ^ (keys >> 16)
