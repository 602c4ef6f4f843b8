"""Matrix products of layers' outputs: the scores of attention, and the values that they weigh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlsprune.graph.fields import compact
from rlsprune.graph.labels import EVERYTHING, Label, LabelSets, broadcast, is_constant
from rlsprune.graph.members import Axis

__all__ = ["Contraction", "Products", "Slot", "merged_contractions"]


@dataclass(frozen=True)
class Slot:
    """One channel of one side of one layer, or of a parameter that stands by itself."""

    axis: Axis
    channel: int


@dataclass(frozen=True)
class Contraction:
    """The channels that were multiplied and summed up to make one score of one head."""

    left: tuple[int, ...]
    """Slots of the queries, ascending."""
    right: tuple[int, ...]
    """Slots of the keys."""
    pairs: tuple[tuple[int, int], ...] | None
    """Slots that met each other, one by one; None where an entry was made of several, as by a rotation."""


@dataclass
class Products:
    """Labels of products, and the contractions that were seen in them."""

    labels: LabelSets
    slots: Sequence[Slot]
    lone: Mapping[Axis, tuple[nn.Module, int]]
    """Parameters that stand by themselves."""
    contractions: list[Contraction] = field(default_factory=list)

    def of_matrices(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns the labels of ``left @ right``, from theirs."""
        places = is_constant(left, -1) and (self._are_scores(left) or is_constant(right, -2))
        if places and not self._are_mixed_heads(left, right):
            # The sum goes over places, tokens say, not over channels: the left side says how much of each.
            weights = self.labels.each(left[..., :1], self.labels.as_scores)
            return self.labels.elementwise(weights, self.labels.joined_along(right, -2))
        # Positions may turn some of the tokens and not others: all channels that any of them is made of count.
        rows, columns = self.labels.joined_along(left, -2), self.labels.joined_along(right, -1)
        rows, columns = broadcast(rows[..., 0, :], columns[..., :, 0])
        both = torch.stack([rows, columns], -1).reshape(-1, 2 * rows.shape[-1])
        heads, back = torch.unique(both, dim=0, return_inverse=True)
        found = torch.tensor([self._contract(head) for head in heads.tolist()], dtype=torch.long)
        return found[back].view(*rows.shape[:-1], 1, 1).expand(*rows.shape[:-1], left.shape[-2], right.shape[-1])

    def of_einsum(self, equation: str, left: Tensor, right: Tensor) -> Tensor:
        """Returns the labels of ``torch.einsum`` of two tensors, as a product of matrices."""
        given, _, made = equation.replace(" ", "").partition("->")
        one, two = given.split(",")
        if not made or "." in equation or any(len(set(part)) < len(part) for part in (one, two)):
            raise ValueError(f"{equation} is not known as a product")
        size = dict(zip(one + two, (*left.shape, *right.shape), strict=True))
        inner = [letter for letter in one if letter in two and letter not in made]
        rows, columns = ([letter for letter in part if letter not in other] for part, other in ((one, two), (two, one)))
        if not inner or not set(rows + columns) <= set(made):
            raise ValueError(f"{equation} is not known as a product")
        # Rows, or columns, lie along a letter of their own that does not tell channels apart; heads along others.
        rows = [letter for letter in rows if is_constant(left, one.index(letter))][-1:]
        columns = [letter for letter in columns if is_constant(right, two.index(letter))][-1:]
        outer = [letter for letter in made if letter not in rows + columns]

        def shaped(labels: Tensor, letters: str, *matrix: list[str]) -> Tensor:
            order = [letter for part in (outer, *matrix) for letter in part if letter in letters]
            sizes = [size[letter] if letter in letters else 1 for letter in outer]
            moved = labels.permute([letters.index(letter) for letter in order])
            return moved.reshape(sizes + [math.prod(size[letter] for letter in part) for part in matrix])

        product = self.of_matrices(shaped(left, one, rows, inner), shaped(right, two, inner, columns))
        letters = outer + rows + columns
        sizes = [size[letter] for letter in outer] + [math.prod(size[own] for own in part) for part in (rows, columns)]
        spread = product.expand(sizes).reshape([size[letter] for letter in letters])
        return spread.permute([letters.index(letter) for letter in made])

    def _are_scores(self, labels: Tensor) -> bool:
        return all(self.labels[number].scores for number in torch.unique(compact(labels)).tolist())

    def _are_mixed_heads(self, left: Tensor, right: Tensor) -> bool:
        """Whether all entries of a head were mixed on both sides, as a norm of queries and keys does."""
        if not (is_constant(left, -2) and is_constant(right, -1)):
            return False
        sides = [[self.labels[number] for number in torch.unique(compact(side)).tolist()] for side in (left, right)]
        return all(not label.scores and len(self._layers_of([label])) > 1 for side in sides for label in side)

    def _contract(self, head: list[int]) -> int:
        """Returns the label of a score, from those of the entries that meet: of a query and of a key, in turns."""
        if EVERYTHING in head:
            return EVERYTHING
        queries, keys = [self.labels[number] for number in head[::2]], [self.labels[number] for number in head[1::2]]
        left, right = self._layers_of(queries), self._layers_of(keys)
        rest = frozenset[int]().union(*(label.scores for label in queries + keys))
        own = [(self._layers_of([q]), self._layers_of([k])) for q, k in zip(queries, keys, strict=True)]
        alone = not rest and all(len(q) == len(k) == 1 for q, k in own)
        pairs = tuple((q[0], k[0]) for q, k in own) if alone else None
        if left and right:
            self.contractions.append(Contraction(tuple(left), tuple(right), pairs))
        return self.labels.of((), rest.union(*(label.direct for label in queries + keys)))

    def _layers_of(self, labels: list[Label]) -> list[int]:
        """Returns the slots of layers, without those of lone parameters that scale them, say."""
        direct = frozenset[int]().union(*(label.direct for label in labels))
        return sorted(slot for slot in direct if self.slots[slot].axis not in self.lone) or sorted(direct)


def merged_contractions(seen: Sequence[Contraction]) -> list[Contraction]:
    """Returns one per head: its pairs are known if they were the same every time, for all tokens say."""
    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], set[tuple[tuple[int, int], ...] | None]] = {}
    for one in seen:
        pairs.setdefault((one.left, one.right), set()).add(one.pairs)
    return [Contraction(*sides, next(iter(met)) if len(met) == 1 else None) for sides, met in pairs.items()]
