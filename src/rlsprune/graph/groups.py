"""Groups of channels that must go together, and how they move when some of them went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlsprune.graph.layers import Side
from rlsprune.model.tensors import complement

if TYPE_CHECKING:
    from rlsprune.graph.cuts import Cuts

Axis = tuple[str, Side]


@dataclass(frozen=True)
class Member:
    """One side of one layer, and which of its channels belong to which unit of the group."""

    name: str
    """Of the module in ``model.named_modules()``; of the parameter for a parameter that stands by itself."""
    module: nn.Module
    """The layer; for a parameter that stands by itself, the module that owns it."""
    side: Side
    index: Tensor
    """(units × k): the channels on that side that belong to each unit, ascending."""
    dim: int | None = None
    """For a parameter that stands by itself, the dimension along which its channels lie."""
    reads: nn.Module | None = None
    """The module whose output the layer is called with, where that is known."""

    @property
    def axis(self) -> Axis:
        """What the index counts along: members of different groups can share it, as after a concatenation."""
        return self.name, self.side


@dataclass(frozen=True)
class Group:
    """Channels that must go together.

    A depthwise convolution is a carrier: it makes each channel from one channel, so it neither mixes units nor counts
    as a layer that makes or reads them, but its weights shrink with them.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        >>> pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters()), torch.rand(2, 4))
        >>> inputs, hidden = pruner.groups
        >>> hidden.name, hidden.size, [member.name for member in hidden.members]
        ('0', 8, ['0', '1', '2'])
        >>> inputs.is_input
        True
    """

    name: str
    """Of the first producer; ``input`` for the features of the network's input."""
    size: int
    """Units that are left."""
    is_input: bool
    """Whether the units are features of the network's input, which no layer makes."""
    producers: tuple[Member, ...]
    """Layers whose output channels are the units: linear, convolution, embedding."""
    carriers: tuple[Member, ...]
    """Layers passed through channel by channel: normalisation, PReLU, depthwise convolution, lone parameters."""
    consumers: tuple[Member, ...]
    """Layers whose input channels are the units."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Producers, carriers and consumers."""
        return self.producers + self.carriers + self.consumers

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Of all members."""
        return frozenset(member.axis for member in self.members)


class ChannelGraph:
    """All groups of a network, in the order in which it runs, the groups of its inputs first.

    Groups are immutable: ``shrink`` puts new ones in place of the old, so to undo it is to assign the old ``groups``.
    """

    def __init__(self, groups: Sequence[Group], skipped: Mapping[str, str]) -> None:
        self.groups = tuple(groups)
        self.skipped = dict(skipped)
        """Name of what was left alone → why."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r}; there are {', '.join(group.name for group in self.groups) or 'none'}")

    def shrink(self, cuts: Cuts) -> None:
        """Renumber every group after a plan was carried out; without running the network again."""
        places = {axis: stay.cumsum(0) - 1 for axis, stay in cuts.stay.items()}
        self.groups = tuple(_renumber(group, cuts.units.get(group.name), places) for group in self.groups)


def unit_index(group: Group, units: Tensor | Sequence[int]) -> Tensor:
    """Units as a sorted index tensor without repeats, on the CPU.

    Raises:
        ValueError: if a unit does not exist, or none would be left.
    """
    index: Tensor = torch.unique(torch.as_tensor(units, dtype=torch.long).detach().cpu())
    if len(index) and not 0 <= int(index[0]) <= int(index[-1]) < group.size:
        raise ValueError(f"{group.name}: units must lie in 0…{group.size - 1}, got {index.tolist()}")
    if len(index) == group.size:
        raise ValueError(f"{group.name}: cannot remove all {group.size} units; leave at least one")
    return index


def _renumber(group: Group, units: Tensor | None, places: Mapping[Axis, Tensor]) -> Group:
    """The group without some units, its channels where they are now."""
    if units is None and group.axes.isdisjoint(places):
        return group
    keep = torch.arange(group.size) if units is None else complement(group.size, units)

    def moved(member: Member) -> Member:
        index = member.index.index_select(0, keep)
        return replace(member, index=places[member.axis][index] if member.axis in places else index)

    return replace(
        group,
        size=len(keep),
        producers=tuple(map(moved, group.producers)),
        carriers=tuple(map(moved, group.carriers)),
        consumers=tuple(map(moved, group.consumers)),
    )
