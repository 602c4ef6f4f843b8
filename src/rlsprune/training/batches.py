"""Batches as a user gives them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized

import torch

from rlsprune.training.loop import Batch

__all__ = ["OnDevice"]


class OnDevice:
    """Batches, moved to where the network is as they are used.

    Args:
        batches: Of (inputs, labels), to be gone through many times.
        device: Of the network.
        name: What the user calls them.

    Raises:
        ValueError: There is none.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device, name: str) -> None:
        self._batches, self._device, self._name = batches, device, name
        first = next(iter(self), None)
        if first is None:
            raise self._empty()
        self.example = first[0][:1]
        """One input."""

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self._batches:
            yield inputs.to(self._device), labels.to(self._device)

    def __len__(self) -> int:
        return len(self._batches) if isinstance(self._batches, Sized) else sum(1 for _ in self._batches)

    def sample(self, count: int) -> list[Batch]:
        """At most so many inputs, evenly from all of them; whole batches where these cannot be joined."""
        shapes = [(inputs.shape, labels.shape) for inputs, labels in self._batches]
        if not shapes:
            raise self._empty()
        sizes = [inputs[0] for inputs, _ in shapes]
        every = math.ceil(sum(sizes) / count)
        if any(x[0] != y[0] or (x[1:], y[1:]) != (shapes[0][0][1:], shapes[0][1][1:]) for x, y in shapes):
            return list(itertools.islice(self, 0, None, every))
        chosen = [
            # A copy: a slice would keep its whole batch in memory.
            [part[-start % every :: every].to(self._device, copy=True) for part in batch]
            for start, batch in zip(itertools.accumulate(sizes, initial=0), self._batches, strict=False)
        ]
        inputs, labels = (torch.split(torch.cat(parts), max(sizes)) for parts in zip(*chosen, strict=True))
        return list(zip(inputs, labels, strict=True))

    def _empty(self) -> ValueError:
        return ValueError(f"{self._name} has no batch: give (inputs, labels) that can be gone through many times")
