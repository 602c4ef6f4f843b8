"""Heads of attention, and dimensions inside of them, as groups of units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlsprune.graph.family import Family, HeadUnit, find_families
from rlsprune.graph.flow import Flow
from rlsprune.graph.groups import Group
from rlsprune.graph.heads import Attention, HeadSize
from rlsprune.graph.layers import sides
from rlsprune.graph.members import Axis, Member
from rlsprune.graph.observe import Observation
from rlsprune.model.collector import without_collector

__all__ = ["Candidate", "find_attention"]


@dataclass
class Candidate:
    """An attention as it was seen, not verified yet."""

    attention: Attention
    kind: tuple[str, ...]
    """Key that is equal for attentions that the same code computes."""
    heads: Group | None
    queries: Group | None
    """Units of one query head of each key-value head, where several share one."""
    keys: Group | None
    """Units of one dimension of the queries and keys of each head."""
    values: Group | None
    """Units of one dimension of the values of each head."""
    outer: tuple[HeadSize, ...] = ()
    """Attributes that may be the width of all heads, or that of the attention's input."""
    home: str | None = None
    """The module that computes it, if that knows how many heads it has."""

    @property
    def reads_input(self) -> bool:
        """Whether the layer that makes the queries has inputs of its own: their number may be in the code."""
        return "in" in sides(self.attention.queries.module)

    @property
    def dims(self) -> Group | None:
        """Returns the group of one dimension of queries, keys and values: many networks have one width for all."""
        if self.keys is None or self.values is None or self.keys.size != self.values.size:
            return None
        name = f"{self.attention.name}[dims]"
        producers = _merged([*self.keys.producers, *self.values.producers])
        carriers = _merged([*self.keys.carriers, *self.values.carriers])
        return replace(self.values, name=name, producers=producers, carriers=carriers, products=self.keys.products)

    def with_attention(self, **changes: object) -> Candidate:
        """Returns the candidate with changes to its attention: other attributes to keep true, or another scale."""
        attention = replace(self.attention, **changes)  # type: ignore[arg-type]
        parts = {
            part: None if group is None else replace(group, attention=attention)
            for part, group in (
                ("heads", self.heads),
                ("queries", self.queries),
                ("keys", self.keys),
                ("values", self.values),
            )
        }
        return replace(self, attention=attention, **parts)  # type: ignore[arg-type]


@without_collector()
def find_attention(
    model: nn.Module, flow: Flow, seen: Observation, order: Mapping[nn.Module, int], ignore: Collection[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Finds the attentions of a network.

    The channels of a head are tied together: inputs of the layer that reads all heads, values that they are made of,
    and the queries and keys that decide on how much of each.

    Args:
        model: The network, in which ``nn.MultiheadAttention`` is open.
        flow: Flow of its channels.
        seen: Observation of one run.
        order: Module → position of its first call.
        ignore: Names of modules that keep all their channels.

    Returns:
        The attentions in the order in which the network runs, and name → reason of what must be left alone.
    """
    modules = dict(model.named_modules())
    skipped: dict[str, str] = {}
    found: list[tuple[Candidate, set[Axis]]] = []
    by_readers: dict[frozenset[Axis], Candidate] = {}
    attending = [name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    for family in find_families(flow, modules):
        if not family.readers:
            attending.append(family.name)
        elif why := family.trouble or family.kept(ignore):
            skipped[f"{family.name}[heads]"] = why
        elif other := by_readers.get(frozenset(family.readers)):
            other.keys = None
            skipped[f"{other.attention.name}[keys]"] = "its scores are a sum of several products"
        else:
            taken = {one.attention.name for one, _ in found}
            family.name = next(name for name in family.names() if name not in taken)
            candidate = by_readers[frozenset(family.readers)] = _Maker(family, seen, order).candidate()
            found.append((candidate, family.axes()))
    for candidate, axes in found:
        shared = sorted({axis[0] for other, theirs in found if other is not candidate for axis in axes & theirs})
        if shared and (candidate.heads or candidate.queries):
            skipped[f"{candidate.attention.name}[heads]"] = f"other attention uses {', '.join(shared)} too"
            candidate.heads = candidate.queries = None
    for name in set(attending) - {candidate.attention.name for candidate, _ in found}:
        skipped.setdefault(f"{name}[heads]", "no layer is known to read what its heads make, and nothing else")
    found.sort(key=lambda pair: order.get(pair[0].attention.queries.module, len(order)))
    return [candidate for candidate, _ in found], skipped


@dataclass
class _Maker:
    """Makes groups of one attention."""

    family: Family
    seen: Observation
    order: Mapping[nn.Module, int]

    def candidate(self) -> Candidate:
        """Makes the groups of heads, of queries that share a key, and of dimensions inside of heads."""
        family, whole = self.family, self.family.units()
        keys, queries = sorted({one.right for one in family.scores}), [one.left for one in family.scores]
        values = self._values_of(whole)
        if len({len(head) for head in values}) > 1:
            values = [sorted(family.values)]  # not the same of each head: they are not told apart
        attention = Attention(family.name, self._heads(queries), self._heads(keys), self._heads(values), ())
        biases = {family.flow.slots[slot].axis for head in queries for own in head for slot in self._biases(own)}
        attention = replace(attention, biases=tuple(self._member(axis, self._all(axis)) for axis in sorted(biases)))
        inner, outer = family.sizes(attention.counts({}))
        attention = replace(attention, sizes=inner)
        result = Candidate(attention, family.kind(), None, None, None, None, outer, family.home())
        if len(whole) > 1 and _alike(whole):
            result.heads = self._group("heads", whole, attention, 0)
        rows = family.units(without=family.values.union(*keys))
        homes = [_home(row, whole) for row in rows]
        if len(rows) > len(whole) and _alike(rows) and len({homes.count(home) for home in homes}) == 1:
            result.queries = self._group("queries", _spread(rows, homes), attention, 1)
        result.keys = self._keys(attention)
        result.values = self._values(values, attention) if len(values) == len(whole) else None
        return result

    def _heads(self, heads: Sequence[Sequence[int]]) -> Member:
        """Makes a member of the slots of each head, all of one layer."""
        slots = self.family.flow.slots
        return self._member(slots[heads[0][0]].axis, [[slots[slot].channel for slot in head] for head in heads])

    def _biases(self, slot: int) -> list[int]:
        """Returns the slots of lone parameters that are added to a channel of a layer."""
        return self.family.flow.biases.get(slot, [])

    def _all(self, axis: Axis) -> list[list[int]]:
        """Returns all entries of a lone parameter."""
        module, dim = self.family.flow.lone[axis]
        tensor = {**module._buffers, **module._parameters}[axis[0].rpartition(".")[2]]
        return [[entry] for entry in range(0 if tensor is None else tensor.shape[dim])]

    def _parts(self, slot: int) -> list[tuple[Axis, list[int]]]:
        """Returns a channel of a layer, and what is added to it."""
        slots = self.family.flow.slots
        return [(slots[own].axis, [slots[own].channel]) for own in (slot, *self._biases(slot))]

    def _values_of(self, heads: Sequence[HeadUnit]) -> list[list[int]]:
        """Returns the slots of each head's values, ascending: all are of one layer."""
        slots = self.family.flow.slots
        places = {slots[slot].channel: slot for slot in self.family.values}
        axis = slots[min(self.family.values)].axis
        return [[places[channel] for channel in head.get(axis, ()) if channel in places] for head in heads]

    def _keys(self, attention: Attention) -> Group | None:
        slots = self.family.flow.slots
        if any(one.pairs is None or len(one.pairs) < 2 for one in self.family.scores):
            return None
        ordered = [sorted(one.pairs or (), key=lambda pair: pair[1]) for one in self.family.scores]
        query, key = slots[ordered[0][0][0]].axis, slots[ordered[0][0][1]].axis
        left = [[slots[pair[0]].channel for pair in met] for met in zip(*ordered, strict=True)]
        right = [[slots[pair[1]].channel for pair in met] for met in zip(*ordered, strict=True)]
        product = (self._member(query, left), self._member(key, right))
        units = [
            _unit(part for pair in met for slot in pair for part in self._parts(slot))
            for met in zip(*ordered, strict=True)
        ]
        group = self._group("keys", units, attention, 2)
        return replace(group, products=(product,))

    def _values(self, heads: Sequence[Sequence[int]], attention: Attention) -> Group | None:
        labels = self.family.flow.labels
        place = {slot: rank for head in heads for rank, slot in enumerate(head)}
        parts: list[list[tuple[Axis, list[int]]]] = [[] for _ in heads[0]]
        for slot, rank in place.items():
            parts[rank] += self._parts(slot)
        for axis, numbers in self.family.readers.items():
            for channel, number in enumerate(numbers):
                read = labels[number].direct & self.family.values
                if len(read) != 1:
                    return None
                parts[place[next(iter(read))]].append((axis, [channel]))
        units = [_unit(part) for part in parts]
        return self._group("values", units, attention, 2) if len(units) > 1 and _alike(units) else None

    def _group(self, what: str, units: Sequence[HeadUnit], attention: Attention, level: int) -> Group:
        members = [self._member(axis, [unit[axis] for unit in units]) for axis in sorted(units[0], key=self._place)]
        made, carried, read = (tuple(one for one in members if one.side == side) for side in ("out", "both", "in"))
        name = f"{self.family.name}[{what}]"
        return Group(name, len(units), False, made, carried, read, (), attention, level)

    def _place(self, axis: Axis) -> tuple[int, Axis]:
        """Returns a key by the layer's position in the run: members of a group come in that order."""
        module = self.family.modules.get(axis[0])
        return (len(self.order) if module is None else self.order.get(module, len(self.order))), axis

    def _member(self, axis: Axis, channels: Sequence[Sequence[int]]) -> Member:
        index = torch.tensor([list(row) for row in channels], dtype=torch.long)
        if axis in self.family.flow.lone:
            module, dim = self.family.flow.lone[axis]
            return Member(axis[0], module, axis[1], index, dim)
        module = self.family.modules[axis[0]]
        return Member(axis[0], module, axis[1], index, None, self.seen.sources.get(module))


def _alike(units: Sequence[HeadUnit]) -> bool:
    return len({frozenset((axis, len(channels)) for axis, channels in unit.items()) for unit in units}) == 1


def _home(row: HeadUnit, whole: Sequence[HeadUnit]) -> int | None:
    """Returns the number of the head that a part belongs to, or None."""
    for number, unit in enumerate(whole):
        if all(set(channels) <= set(unit.get(axis, ())) for axis, channels in row.items()):
            return number
    return None


def _spread(rows: Sequence[HeadUnit], homes: Sequence[int | None]) -> list[HeadUnit]:
    """Makes units with one row of each home."""
    by_home = [[row for row, own in zip(rows, homes, strict=True) if own == home] for home in dict.fromkeys(homes)]
    return [
        _unit([(axis, channels) for row in together for axis, channels in row.items()])
        for together in zip(*by_home, strict=True)
    ]


def _unit(parts: Iterable[tuple[Axis, Sequence[int]]]) -> HeadUnit:
    unit: dict[Axis, set[int]] = {}
    for axis, channels in parts:
        unit.setdefault(axis, set()).update(channels)
    return {axis: sorted(channels) for axis, channels in unit.items()}


def _merged(members: Sequence[Member]) -> tuple[Member, ...]:
    """Merges the members of one side of one layer."""
    found: dict[Axis, Member] = {}
    for member in members:
        if member.axis in found:
            index = torch.cat([found[member.axis].index, member.index], 1).sort(1).values
            member = replace(member, index=index)
        found[member.axis] = member
    return tuple(found.values())
