"""Labels of the entries of a tensor, in a tensor of the same shape, and the channels that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rlsprune.graph.fields import compact

__all__ = ["EVERYTHING", "NOTHING", "Label", "LabelSets", "broadcast", "is_constant"]

NOTHING, EVERYTHING = 0, 1
"""Labels of an entry that no channel was followed to, and of one that too many were."""

_MOST = 1024  # channels that one entry is made of: a head has a few hundred, what a norm over the width mixes has more
_MOST_SCORES = 4096


class Label(NamedTuple):
    """The channels that one entry was made from."""

    direct: frozenset[int]
    """Channels whose values it is made of, one by one."""
    scores: frozenset[int]
    """Channels that only decide on how much: those behind an attention's scores."""


class LabelSets:
    """All labels so far, by number. Equal ones have one number; that of a single channel is negative."""

    def __init__(self) -> None:
        nothing = Label(frozenset(), frozenset())
        self._known = [nothing, nothing]
        self._numbers = {nothing: NOTHING}
        self._joined: dict[tuple[int, int], int] = {}

    def __getitem__(self, number: int) -> Label:
        return self._known[number] if number >= 0 else Label(frozenset((-1 - number,)), frozenset())

    @staticmethod
    def of_channels(first: int, count: int) -> Tensor:
        """Returns the numbers of the labels of single channels."""
        return -1 - torch.arange(first, first + count)

    def of(self, direct: Iterable[int], scores: Iterable[int] = ()) -> int:
        """Returns the number of a label."""
        label = Label(frozenset(direct), frozenset(scores))
        if len(label.direct) == 1 and not label.scores:
            return -1 - next(iter(label.direct))
        if len(label.direct) > _MOST or len(label.scores) > _MOST_SCORES:
            return EVERYTHING
        number = self._numbers.setdefault(label, len(self._known))
        if number == len(self._known):
            self._known.append(label)
        return number

    def join(self, numbers: Iterable[int]) -> int:
        """Returns the label of an entry that is made from entries with these."""
        parts = sorted(set(numbers) - {NOTHING})
        if not parts:
            return NOTHING
        if len(parts) < 3:
            return self._pair(parts[0], parts[-1])
        if EVERYTHING in parts:
            return EVERYTHING
        labels = [self[number] for number in parts]
        direct = frozenset[int]().union(*(label.direct for label in labels))
        return self.of(direct, frozenset[int]().union(*(label.scores for label in labels)))

    def _pair(self, one: int, other: int) -> int:
        """Returns the label of an entry that is made from two, as nearly all are."""
        if one == other or other == NOTHING:
            return one
        if one == NOTHING:
            return other
        if one == EVERYTHING or other == EVERYTHING:
            return EVERYTHING
        found = self._joined.get((one, other))
        if found is None:
            (direct, scores), (more, others) = self[one], self[other]
            found = self._joined[one, other] = self.of(direct | more, scores | others if others else scores)
        return found

    def as_scores(self, number: int) -> int:
        """Returns the label of the same channels as scores, which only decide on how much."""
        label = self[number]
        return number if number == EVERYTHING else self.of((), label.direct | label.scores)

    def joined_along(self, labels: Tensor, dim: int) -> Tensor:
        """Returns labels after an operation that mixes the entries along a dimension, which then has one entry."""
        if labels.shape[dim] == 0:
            return labels.sum(dim, keepdim=True)
        if is_constant(labels, dim):
            return labels.narrow(dim, 0, 1)
        small = compact(labels)
        rows, back = torch.unique(small.movedim(dim, -1).reshape(-1, small.shape[dim]), dim=0, return_inverse=True)
        joined = torch.tensor([self.join(row) for row in rows.tolist()])
        shape = [size for place, size in enumerate(small.shape) if place != dim % labels.dim()]
        return joined[back].view(shape).unsqueeze(dim).expand(labels.narrow(dim, 0, 1).shape)

    def elementwise(self, *labels: Tensor) -> Tensor:
        """Returns labels of a result that is computed entry by entry from tensors that broadcast."""
        parts = broadcast(*labels)
        result = parts[0]
        for part in parts[1:]:
            result = self.each_pair(result, part)
        return result

    def each_pair(self, one: Tensor, other: Tensor) -> Tensor:
        """Joins the labels of two tensors of one shape, entry by entry."""
        if torch.equal(one, other) or not bool(other.any()):
            return one
        if not bool(one.any()):
            return other
        shape = one.shape
        for dim in range(len(shape)):
            if is_constant(one, dim) and is_constant(other, dim):
                one, other = one.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
        least = min(int(one.min()), int(other.min()))
        span = int(other.max()) - least + 1
        pairs, back = torch.unique((one - least) * span + (other - least), return_inverse=True)
        ones, others = (pairs // span + least).tolist(), (pairs % span + least).tolist()
        return torch.tensor(list(map(self._pair, ones, others)))[back].expand(shape)

    def each(self, labels: Tensor, function: Callable[[int], int]) -> Tensor:
        """Replaces every label by what a function makes of its number."""
        known, back = torch.unique(compact(labels), return_inverse=True)
        made = torch.tensor([function(number) for number in known.tolist()], dtype=torch.long)
        return made[back].expand(labels.shape)


def broadcast(*labels: Tensor) -> list[Tensor]:
    """Broadcasts tensors to one shape."""
    shape = torch.broadcast_shapes(*(own.shape for own in labels))  # type: ignore[no-untyped-call]
    return [own.expand(shape) for own in labels]


def is_constant(labels: Tensor, dim: int) -> bool:
    """Whether all entries along a dimension have the same label."""
    return labels.shape[dim] <= 1 or labels.stride(dim) == 0 or bool((labels == labels.narrow(dim, 0, 1)).all())
