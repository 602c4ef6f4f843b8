"""Groups of channels that must go together, renumbered when some of them went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlsprune.graph.heads import Attention, renumbered
from rlsprune.graph.members import Axis, Member
from rlsprune.model.tensors import complement

if TYPE_CHECKING:
    from rlsprune.graph.cuts import Cuts


@dataclass(frozen=True)
class Group:
    """Channels that must go together.

    A depthwise convolution is a carrier: it makes each channel from one channel, so it is no producer or consumer
    of units, but its weights shrink with them.

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
    """The name of the first producer; ``input`` for the features of the network's input."""
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
    products: tuple[tuple[Member, Member], ...] = ()
    """Dimensions of queries and keys: they are read by each other. Channels in the same place of both meet."""
    attention: Attention | None = None
    """Attention of which the units are a part: heads, or dimensions in all heads."""
    level: int = 0
    """Depth among groups that share channels: lower for heads than for the dimensions inside of them."""
    fitted: tuple[str, ...] = ()
    """Modules that read the units and whose code uses the width of its input as that of its heads."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Returns producers, carriers and consumers."""
        return self.producers + self.carriers + self.consumers

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Returns the axes of all members, and of the queries, keys and values of its attention."""
        attention = () if self.attention is None else self.attention.members
        return frozenset(member.axis for member in (*self.members, *attention))


class ChannelGraph:
    """All groups of a network, in the order in which it runs, the groups of its inputs first.

    Groups are immutable: ``shrink`` puts new ones in place of the old, so assigning the old ``groups`` undoes it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        skipped: Mapping[str, str],
        uncalled: Mapping[nn.Module, Sequence[str]] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.skipped = dict(skipped)
        """Name of what was left alone → reason."""
        self.uncalled = dict(uncalled or {})
        """Module → names, in it, of layers that read heads in its functions, without being called."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r}; there are {', '.join(group.name for group in self.groups) or 'none'}")

    def moved_to(self, modules: Mapping[nn.Module, nn.Module]) -> ChannelGraph:
        """Returns the same groups of a network of the same structure, whose modules stand in the places of these."""

        def moved(member: Member) -> Member:
            reads = None if member.reads is None else modules[member.reads]
            return replace(member, module=modules[member.module], reads=reads)

        def of(group: Group) -> Group:
            attention = None if group.attention is None else group.attention.each_member(moved)
            return replace(_each_member(group, moved), attention=attention)

        uncalled = {modules[module]: names for module, names in self.uncalled.items()}
        return ChannelGraph([of(group) for group in self.groups], self.skipped, uncalled)

    def shrink(self, cuts: Cuts) -> None:
        """Renumbers every group after a plan was carried out, without running the network again."""
        self.groups = tuple(_renumber(group, cuts.units.get(group.name), cuts.stay) for group in self.groups)


def unit_index(group: Group, units: Tensor | Sequence[int]) -> Tensor:
    """Returns units as a sorted index tensor without repeats, on the CPU.

    Raises:
        ValueError: if a unit does not exist, or none would be left.
    """
    index: Tensor = torch.unique(torch.as_tensor(units, dtype=torch.long).detach().cpu())
    if len(index) and not 0 <= int(index[0]) <= int(index[-1]) < group.size:
        raise ValueError(f"{group.name}: units must lie in 0…{group.size - 1}, got {index.tolist()}")
    if len(index) == group.size:
        raise ValueError(f"{group.name}: cannot remove all {group.size} units; leave at least one")
    return index


def _renumber(group: Group, units: Tensor | None, stay: Mapping[Axis, Tensor]) -> Group:
    """Returns the group without some units, with its channels where they are now."""
    if units is None and group.axes.isdisjoint(stay):
        return group
    keep = torch.arange(group.size) if units is None else complement(group.size, units)

    def moved(member: Member) -> Member:
        return renumbered(replace(member, index=member.index.index_select(0, keep)), stay)

    attention = None if group.attention is None else group.attention.renumbered(stay)
    products = tuple(_met(one, other, stay) for one, other in group.products)
    return replace(_each_member(replace(group, products=products), moved), size=len(keep), attention=attention)


def _met(queries: Member, keys: Member, stay: Mapping[Axis, Tensor]) -> tuple[Member, Member]:
    """Returns the queries and keys that meet: where several queries share a key, those that go leave it alone."""
    if queries.axis not in stay:
        return queries, keys
    left = stay[queries.axis][queries.index]
    whole = left.all(1) | ~left.any(1)
    if bool(whole.all()):
        return queries, keys
    return queries, replace(keys, index=keys.index[left].view(len(left), -1))


def _each_member(group: Group, change: Callable[[Member], Member]) -> Group:
    return replace(
        group,
        producers=tuple(map(change, group.producers)),
        carriers=tuple(map(change, group.carriers)),
        consumers=tuple(map(change, group.consumers)),
        products=tuple((change(one), change(other)) for one, other in group.products),
    )
