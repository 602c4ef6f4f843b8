"""Batches as a user gives them: inputs alone, or with targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rlsprune.model.calls import ExampleInputs, batch_size

__all__ = ["GivenBatches", "Pair", "as_pair", "split"]

Pair = tuple[ExampleInputs, Any]
"""Inputs, and targets or None."""


def as_pair(batch: Any) -> Pair:
    """Tells inputs from targets.

    A pair is (inputs, targets); a mapping's ``labels`` are its targets; a tensor is inputs alone. Several inputs
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
    """The batch in pieces of at most so many inputs."""
    count = batch_size(inputs)

    def piece(start: int) -> ExampleInputs:
        return _cut(inputs, slice(start, start + size), count)  # type: ignore[no-any-return]

    return [piece(start) for start in range(0, count, size)]


class GivenBatches:
    """Batches, moved to where the network is as they are used.

    Args:
        batches: As `as_pair` takes them, to be gone through many times.
        device: Of the network.
        name: What the user calls them.

    Raises:
        ValueError: There is none, or they can be gone through only once.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device, name: str) -> None:
        if isinstance(batches, Iterator):
            raise ValueError(
                f"{name} can be gone through only once: give a list of batches or a DataLoader, not its iterator"
            )
        self._batches, self._device, self._name = batches, device, name
        batch = next(iter(batches), None)
        if batch is None:
            raise self._empty()
        first = self._moved(as_pair(batch))
        self.named = isinstance(batch, Mapping)
        """Whether a batch is a mapping, so that its labels are meant for the network itself."""
        self.example: ExampleInputs = _cut(first[0], slice(0, 1), batch_size(first[0]))
        """One input."""
        self.targets = first[1]
        """The targets of the first batch, or None."""

    def __iter__(self) -> Iterator[Pair]:
        return (self._moved(as_pair(batch)) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches) if isinstance(self._batches, Sized) else sum(1 for _ in self._batches)

    def sample(self, count: int) -> list[Pair]:
        """Samples at most this many inputs: evenly from a list, else the first ones.

        Whole batches where parts of them cannot be joined; at least one.
        """
        if not isinstance(self._batches, Sequence):
            return self._first(count)
        pairs = [as_pair(batch) for batch in self._batches]
        sizes = [batch_size(inputs) for inputs, _ in pairs]
        every = max(1, math.ceil(sum(sizes) / count))
        if not _joinable(pairs, sizes):
            return [self._moved(pair) for pair in pairs[::every]]
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            _cut(pair, slice(-start % every, None, every), size)
            for start, pair, size in zip(starts, pairs, sizes, strict=False)
        ]
        flat = [tree_flatten(part) for part in parts]
        joined = [
            torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(f for f, _ in flat), strict=True)
        ]
        whole = tree_unflatten(joined, flat[0][1])
        total = batch_size(whole[0])
        pieces = [_cut(whole, slice(start, start + max(sizes)), total) for start in range(0, total, max(sizes))]
        return [self._moved(pair, copy=True) for pair in pieces]

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

    def _moved(self, pair: Pair, copy: bool = False) -> Pair:
        def moved(leaf: Any) -> Any:
            return leaf.to(self._device, copy=copy) if isinstance(leaf, Tensor) else leaf

        return tree_map(moved, pair)  # type: ignore[no-any-return]

    def _empty(self) -> ValueError:
        return ValueError(f"{self._name} has no batch: give inputs, or (inputs, targets), in batches")


def _cut(value: Any, part: slice, count: int) -> Any:
    """The same of every tensor that has an entry for each input."""

    def cut(leaf: Any) -> Any:
        return leaf[part] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count else leaf

    return tree_map(cut, value)


def _joinable(pairs: Sequence[Pair], sizes: Sequence[int]) -> bool:
    """Whether all tensors have an entry for each input, and the same shapes but for that."""
    kinds = set()
    for pair, size in zip(pairs, sizes, strict=True):
        leaves, form = tree_flatten(pair)
        if any(isinstance(leaf, Tensor) and (not leaf.dim() or len(leaf) != size) for leaf in leaves):
            return False
        kinds.add((str(form), tuple(leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in leaves)))
    return len(kinds) == 1
