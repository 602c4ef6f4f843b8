"""One attention: the places of its heads in the layers that make them, and the attributes that say their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlsprune.graph.layers import axis_of, join
from rlsprune.graph.members import Axis, Member
from rlsprune.model.sizes import FITTED

__all__ = ["Attention", "HeadSize", "Rescaled"]


Rescaled = Literal["head_dim", "input"] | None


@dataclass(frozen=True)
class HeadSize:
    """An attribute of a module that has to stay true."""

    module: str
    attribute: str
    role: str
    """Key of its value in `Attention.counts`."""


@dataclass(frozen=True)
class Attention:
    """The heads of one attention and the dimensions inside of them, which all its groups cut."""

    name: str
    queries: Member
    """Queries, with the channels of each head: (heads × width)."""
    keys: Member
    """Keys, of fewer heads where several queries share one."""
    values: Member
    sizes: tuple[HeadSize, ...]
    rescaled: Rescaled = None
    """Width by whose root the code divides scores, if it changes: queries are scaled to undo that. It is the width left
    of a head, or that of the attention's input over the number of heads left."""
    fitted: str | None = None
    """The module whose code uses the width of its input as that of its heads."""
    biases: tuple[Member, ...] = ()
    """Lone parameters that are added to the queries, with entries in the order of theirs."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Returns the members that its heads are made of."""
        return (self.queries, self.keys, self.values, *self.biases)

    def counts(self, stay: Mapping[Axis, Tensor]) -> dict[str, int]:
        """Returns the sizes of what stays."""
        heads, head_dim = _left(self.queries, stay)
        kv_heads, _ = _left(self.keys, stay)
        _, value_dim = _left(self.values, stay)
        return {
            "heads": heads,
            "kv_heads": kv_heads,
            "repeats": heads // kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "width": heads * value_dim,
            "kv_width": kv_heads * head_dim,
            "outer_width": heads * value_dim,
        }

    def attributes(self, stay: Mapping[Axis, Tensor]) -> dict[str, dict[str, int]]:
        """Returns name of a module → attribute → its value for what stays."""
        counts = self.counts(stay)
        found: dict[str, dict[str, int]] = {}
        for size in self.sizes:
            found.setdefault(size.module, {})[size.attribute] = counts[size.role]
        if self.fitted is not None:
            found.setdefault(self.fitted, {})[FITTED] = 1
        return found

    def factors(self, stay: Mapping[Axis, Tensor]) -> dict[str, tuple[int, Tensor]]:
        """Returns name of a tensor → dimension, and factors of the entries along it that stay."""
        width, left = self._divisor({}), self._divisor(stay)
        if left == width:
            return {}
        member, kept = self.queries, stay[self.queries.axis]
        scale = torch.ones(len(kept), dtype=torch.float64)
        scale[member.index.flatten()] = math.sqrt(left / width)
        tensors = member.module._parameters
        found = {
            join(member.name, slab.tensor): (slab.dim, scale[kept])
            for slab in axis_of(member.module, member.side).slabs
            if tensors.get(slab.tensor) is not None
        }
        for bias in self.biases:
            assert bias.dim is not None
            found[bias.name] = (bias.dim, torch.full((int(stay[bias.axis].sum()),), math.sqrt(left / width)))
        return found

    def _divisor(self, stay: Mapping[Axis, Tensor]) -> int:
        """Returns the number by whose root the code divides the scores, as far as that changes."""
        counts, module = self.counts(stay), self.queries.module
        if self.rescaled == "head_dim":
            return counts["head_dim"]
        if self.rescaled == "input":
            return axis_of(module, "in").size // counts["heads"]
        return 1

    def renumbered(self, stay: Mapping[Axis, Tensor]) -> Attention:
        """Returns the attention after the cut, with its channels renumbered."""
        return self.each_member(lambda member: renumbered(member, stay))

    def each_member(self, change: Callable[[Member], Member]) -> Attention:
        """Returns the attention with all its members changed."""
        return replace(
            self,
            queries=change(self.queries),
            keys=change(self.keys),
            values=change(self.values),
            biases=tuple(map(change, self.biases)),
        )


def renumbered(member: Member, stay: Mapping[Axis, Tensor]) -> Member:
    """Returns a member without the channels that went, the others numbered as they are now; empty units go."""
    if member.axis not in stay:
        return member
    kept = stay[member.axis]
    left, places = kept[member.index], kept.cumsum(0) - 1
    if bool(left.all()):  # as nearly always, and in half the time
        return replace(member, index=places[member.index])
    return replace(member, index=places[member.index[left]].view(int(left.any(1).sum()), -1))


def _left(member: Member, stay: Mapping[Axis, Tensor]) -> tuple[int, int]:
    """Returns the number of heads that are left, and the width of each."""
    if member.axis not in stay:
        return member.index.shape[0], member.index.shape[1]
    each = stay[member.axis][member.index].sum(1)
    return int((each > 0).sum()), int(each.max())
