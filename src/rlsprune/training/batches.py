"""Batches as a user gives them, with or without targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rlsprune.distributed.ranks import Ranks
from rlsprune.model.arguments import check_iterable
from rlsprune.model.calls import ExampleInputs, batch_size
from rlsprune.model.demands import check_inputs

__all__ = ["GivenBatches", "Pair", "Sample", "as_pair", "split"]

Pair = tuple[ExampleInputs, Any]
"""Inputs, and targets or None."""
T = TypeVar("T")


class Sample(NamedTuple):
    """A sample of the given inputs."""

    pairs: list[Pair]
    numbers: list[Tensor]
    """The numbers of each pair's inputs among those of all ranks, whose batches are counted in turn."""


def as_pair(batch: Any) -> Pair:
    """Separates inputs from targets.

    A pair is (inputs, targets). The ``labels`` of a mapping are its targets. A tensor has inputs only. Several inputs
    without targets come as a mapping, or as ``((one, other), None)``.
    """
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}, batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    if isinstance(batch, Tensor):
        return batch, None
    what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(f"a batch is a {what}: give a tensor, (inputs, targets), a dict, or ((several, inputs), None)")


def split(inputs: ExampleInputs, size: int) -> list[ExampleInputs]:
    """Splits a batch into pieces of at most ``size`` inputs."""
    count = batch_size(inputs)

    def piece(start: int) -> ExampleInputs:
        return _cut(inputs, slice(start, start + size), count)  # type: ignore[no-any-return]

    return [piece(start) for start in range(0, count, size)]


class GivenBatches:
    """The given batches. Each is moved to the network's device when it is used.

    Args:
        batches: Batches that `as_pair` takes; they are iterated many times.
        device: The device of the network.
        name: The user's name for them, for messages.
        ranks: The processes that have batches of their own each, or None.

    Raises:
        ValueError: There is no batch, or the batches can be iterated only once.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device, name: str, ranks: Ranks | None = None) -> None:
        check_iterable(name, batches, "give a list of batches or a DataLoader")
        if isinstance(batches, Iterator):
            raise ValueError(
                f"{name} can be iterated only once: give a list of batches or a DataLoader, not its iterator"
            )
        self._batches, self._device, self._name, self._ranks = batches, device, name, ranks
        batch = next(iter(batches), None)
        if not all(self._of_each(batch is not None)):
            raise self._empty()
        first = self._moved(as_pair(batch))
        check_inputs(first[0], f"batch 1 of {name}")
        self.named = isinstance(batch, Mapping)
        """Whether a batch is a mapping, so that its labels are meant for the network itself."""
        self.example: ExampleInputs = _cut(first[0], slice(0, 1), batch_size(first[0]))
        """A single input."""
        self.targets = first[1]
        """The targets of the first batch, or None."""

    def __iter__(self) -> Iterator[Pair]:
        return map(self._moved, self._pairs())

    def _pairs(self) -> Iterator[Pair]:
        for number, batch in enumerate(self._batches, 1):
            pair = as_pair(batch)
            check_inputs(pair[0], f"batch {number} of {self._name}")
            yield pair

    def __len__(self) -> int:
        return len(self._batches) if isinstance(self._batches, Sized) else sum(1 for _ in self._batches)

    def sample(self, count: int) -> Sample:
        """Samples at most this many inputs, of all ranks together: evenly from a list, else the first ones.

        If parts of batches cannot be joined, it takes whole batches, at least one of each rank.
        """
        if not isinstance(self._batches, Sequence):
            return self._numbered(self._first(math.ceil(count / len(self._of_each(0)))))
        pairs = list(self._pairs())
        sizes = [batch_size(inputs) for inputs, _ in pairs]
        starts, total = self._starts(sizes)
        every = max(1, math.ceil(total / count))
        if not all(self._of_each(_joinable(pairs, sizes))):
            return self._numbered([self._moved(pair) for pair in pairs[::every]])
        parts = [
            _cut(pair, slice(-start % every, None, every), size)
            for start, pair, size in zip(starts, pairs, sizes, strict=True)
        ]
        numbers = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        numbers = numbers[numbers % every == 0] // every
        if not all(self._of_each(len(numbers))):
            raise ValueError(f"a rank has none of the {count} inputs to calibrate on: give all ranks equal shares")
        flat = [tree_flatten(part) for part in parts]
        joined = [
            torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(f for f, _ in flat), strict=True)
        ]
        whole = tree_unflatten(joined, flat[0][1])
        piece = max(self._of_each(max(sizes)))
        pieces = [_cut(whole, slice(start, start + piece), len(numbers)) for start in range(0, len(numbers), piece)]
        return Sample([self._moved(pair, copy=True) for pair in pieces], list(torch.split(numbers, piece)))

    def _first(self, count: int) -> list[Pair]:
        found: list[Pair] = []
        seen = 0
        for inputs, targets in self:
            size = batch_size(inputs)
            if seen + size > count and found:
                break
            found.append((inputs, targets))
            seen += size
        return found

    def _numbered(self, pairs: list[Pair]) -> Sample:
        sizes = [batch_size(inputs) for inputs, _ in pairs]
        starts, _ = self._starts(sizes)
        return Sample(pairs, [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])

    def _starts(self, sizes: list[int]) -> tuple[list[int], int]:
        """Returns the number of inputs before each of this rank's batches, and the total number of inputs.

        The order is the first batch of each rank, then the second of each, and so on.
        """
        everyone = self._of_each(sizes)
        own = 0 if self._ranks is None else self._ranks.rank
        starts, total = [], 0
        for batch in range(max(map(len, everyone))):
            for rank, theirs in enumerate(everyone):
                if batch < len(theirs):
                    if rank == own:
                        starts.append(total)
                    total += theirs[batch]
        return starts, total

    def _of_each(self, value: T) -> list[T]:
        return [value] if self._ranks is None else self._ranks.gather(value)

    def _moved(self, pair: Pair, copy: bool = False) -> Pair:
        def moved(leaf: Any) -> Any:
            return leaf.to(self._device, copy=copy) if isinstance(leaf, Tensor) else leaf

        return tree_map(moved, pair)  # type: ignore[no-any-return]

    def _empty(self) -> ValueError:
        whose = "" if self._ranks is None else " on some rank"
        return ValueError(f"{self._name} has no batch{whose}: give inputs, or (inputs, targets), in batches")


def _cut(value: Any, part: slice, count: int) -> Any:
    """Returns the value with the same part of every tensor that has an entry for each input."""

    def cut(leaf: Any) -> Any:
        return leaf[part] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count else leaf

    return tree_map(cut, value)


def _joinable(pairs: Sequence[Pair], sizes: Sequence[int]) -> bool:
    """Whether all tensors have an entry for each input, and otherwise the same shapes."""
    kinds = set()
    for pair, size in zip(pairs, sizes, strict=True):
        leaves, form = tree_flatten(pair)
        if any(isinstance(leaf, Tensor) and (not leaf.dim() or len(leaf) != size) for leaf in leaves):
            return False
        kinds.add((str(form), tuple(leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in leaves)))
    return len(kinds) == 1
