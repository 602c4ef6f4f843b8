"""Heads of attention, and dimensions inside of them, as groups of units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import nn

from rlsprune.graph.flow import Contraction, Flow
from rlsprune.graph.groups import Group
from rlsprune.graph.heads import Attention, HeadSize
from rlsprune.graph.labels import EVERYTHING
from rlsprune.graph.layers import unprunable
from rlsprune.graph.members import Axis, Member
from rlsprune.graph.observe import Observation
from rlsprune.model.sizes import HEAD_SIZES, head_sizes

__all__ = ["Candidate", "find_attention"]

Node = int | tuple[Axis, int]
"""A slot, or an input of a layer that reads heads."""


@dataclass
class Candidate:
    """An attention as it was seen, not verified yet."""

    attention: Attention
    kind: tuple[object, ...]
    """Alike for attentions that the same code computes."""
    heads: Group | None
    queries: Group | None
    """One query head of each key-value head, where several share one."""
    keys: Group | None
    """One dimension of the queries and keys of each head."""
    values: Group | None
    """One dimension of the values of each head."""
    outer: tuple[HeadSize, ...] = ()
    """Attributes that may be the width of all heads, or that of the attention's input."""

    @property
    def dims(self) -> Group | None:
        """One dimension of queries, keys and values: many networks have one width for all of them."""
        if self.keys is None or self.values is None or self.keys.size != self.values.size:
            return None
        name = f"{self.attention.name}[dims]"
        producers = _merged([*self.keys.producers, *self.values.producers])
        return replace(self.values, name=name, producers=producers, products=self.keys.products)

    def with_attention(self, **changes: object) -> Candidate:
        """The same with other attributes to keep true, or another scale."""
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


def find_attention(
    model: nn.Module, flow: Flow, seen: Observation, order: Mapping[nn.Module, int], ignore: Collection[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """The attentions of a network.

    A head is what hangs together: inputs of the layer that reads all heads, values that they are made of, and the
    queries and keys that decide on how much of each.

    Args:
        model: The network, in which ``nn.MultiheadAttention`` is open.
        flow: Where its channels go.
        seen: What one run showed.
        order: Module → position of its first call.
        ignore: Names of modules that keep all their channels.

    Returns:
        The attentions in the order in which the network runs, and name → reason of what must be left alone.
    """
    modules = dict(model.named_modules())
    skipped: dict[str, str] = {}
    found: list[tuple[Candidate, set[Axis]]] = []
    for family in _families(flow):
        attention = _Family(flow, family, modules, order)
        if not attention.readers:
            continue
        if why := attention.trouble or attention.kept(ignore):
            skipped[f"{attention.name}[heads]"] = why
        else:
            found.append((attention.candidate(seen), attention.axes()))
    for candidate, axes in found:
        shared = sorted({axis[0] for other, theirs in found if other is not candidate for axis in axes & theirs})
        if shared and (candidate.heads or candidate.queries):
            skipped[f"{candidate.attention.name}[heads]"] = f"other attention uses {', '.join(shared)} too"
            candidate.heads = candidate.queries = None
    found.sort(key=lambda pair: order.get(pair[0].attention.queries.module, len(order)))
    return [candidate for candidate, _ in found], skipped


def _families(flow: Flow) -> Iterator[list[Contraction]]:
    """The scores of each attention: those of queries of one layer and keys of one layer."""

    def layers(one: Contraction) -> tuple[Axis, Axis]:
        return flow.slots[one.left[0]].axis, flow.slots[one.right[0]].axis

    for axes, family in groupby(sorted(flow.contractions, key=lambda one: (one.left, one.right)), layers):
        if flow.lone.keys().isdisjoint(axes):
            yield list(family)


@dataclass
class _Family:
    """One attention, from what was seen of it to groups."""

    flow: Flow
    scores: list[Contraction]
    modules: Mapping[str, nn.Module]
    order: Mapping[nn.Module, int]
    trouble: str | None = None
    common: set[int] = field(default_factory=set)
    readers: dict[Axis, list[int]] = field(default_factory=dict)
    """Inputs of layers → the label of each, of those layers that read these heads and nothing else."""

    def __post_init__(self) -> None:
        queries = {slot for one in self.scores for slot in one.left}
        for axis, numbers in self.flow.reads.items():
            mine = [bool(self.flow.labels[number].scores & queries) for number in numbers]
            if any(mine):
                self.readers[axis] = numbers
                if not all(mine) or EVERYTHING in numbers:
                    self.trouble = f"{axis[0]} reads its heads and other channels too"
        self.name = self._name()
        if self.trouble or not self.readers:
            return
        self._set_common()
        self._set_values()
        widths = {(len(one.left), len(one.right)) for one in self.scores}
        if self.trouble is None and len(widths) > 1:
            self.trouble = "its heads are not equally wide"

    def _set_common(self) -> None:
        """Finds lone parameters that all heads use alike, such as the scale of a norm in each head: they stay."""
        heads: dict[int, set[int]] = {}
        keys = {slot: one.right[0] for one in self.scores for slot in one.right}
        for number in {number for numbers in self.readers.values() for number in numbers}:
            label = self.flow.labels[number].direct | self.flow.labels[number].scores
            own = {keys[slot] for slot in label if slot in keys}
            for slot in label:
                if self.flow.slots[slot].axis in self.flow.lone:
                    heads.setdefault(slot, set()).update(own)
        axes = {self.flow.slots[slot].axis for slot, own in heads.items() if len(own) > 1}
        self.common = {slot for slot in heads if self.flow.slots[slot].axis in axes}

    def _set_values(self) -> None:
        """Finds the layer that makes the values, and the heads of keys and values."""
        slots = self.flow.slots
        direct = [self.flow.labels[number].direct for numbers in self.readers.values() for number in numbers]
        lone = {slot for label in direct for slot in label if slots[slot].axis in self.flow.lone}
        values = {slot for label in direct for slot in label} - lone
        if len({slots[slot].axis for slot in values}) != 1:
            self.trouble = "its values do not come from one layer"
            return
        if any(len(label - lone) != 1 for label in direct):
            self.single_values = False
        else:
            self.single_values = True
        self.values = values

    # --- what hangs together ------------------------------------------------------------------------------------------

    def _name(self) -> str:
        """The name of the module that has the layers of queries and keys, or of the layer that makes both."""
        names = {self.flow.slots[slot].axis[0] for one in self.scores for slot in one.left[:1] + one.right[:1]}
        if len(names) == 1:
            only = next(iter(names))
            return only if isinstance(self.modules[only], nn.MultiheadAttention) else only.rpartition(".")[0] or only
        return _common(names) or sorted(names)[0]

    def kept(self, ignore: Collection[str]) -> str | None:
        """Why all heads stay although they could go."""
        names = {slot_axis[0] for slot_axis in self.axes()}
        named = sorted(names & set(ignore))
        if named or self.name in ignore:
            return f"{', '.join(named) or self.name} is named in ignore"
        for name in sorted(names | {axis[0] for axis in self.readers}):
            if name in self.modules and (why := unprunable(self.modules[name])) is not None:
                return f"{name} cannot be cut: {why}"
        return None

    def axes(self) -> set[Axis]:
        """Sides of layers, and lone parameters, that its heads are made of."""
        numbers = [number for numbers in self.readers.values() for number in numbers]
        labels = [self.flow.labels[number] for number in numbers]
        slots = {slot for label in labels for slot in label.direct | label.scores} - self.common
        return {self.flow.slots[slot].axis for slot in slots}

    def _units(self, without: Collection[int] = ()) -> list[dict[Axis, list[int]]]:
        """Sets of channels that hang together, if it were not for some slots: axis → channels, ascending."""
        parent: dict[Node, Node] = {}

        def find(node: Node) -> Node:
            parent.setdefault(node, node)
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for axis, numbers in self.readers.items():
            for channel, number in enumerate(numbers):
                label = self.flow.labels[number]
                for slot in (label.direct | label.scores).difference(self.common, without):
                    parent[find(slot)] = find((axis, channel))
        units: dict[Node, dict[Axis, list[int]]] = {}
        for node in list(parent):
            axis, channel = (
                node if isinstance(node, tuple) else (self.flow.slots[node].axis, self.flow.slots[node].channel)
            )
            units.setdefault(find(node), {}).setdefault(axis, []).append(channel)
        found = [{axis: sorted(channels) for axis, channels in unit.items()} for unit in units.values()]
        first = next(iter(self.readers))
        return sorted(found, key=lambda unit: unit.get(first, []))

    # --- groups -------------------------------------------------------------------------------------------------------

    def candidate(self, seen: Observation) -> Candidate:
        """Groups of heads, of queries that share a key, and of dimensions inside of heads."""
        slots, whole = self.flow.slots, self._units()
        keys = sorted({one.right for one in self.scores})
        queries = [one.left for one in self.scores]
        by_value = {slot: number for number, unit in enumerate(whole) for slot in self._slots_of(unit) & self.values}
        values = [sorted(slot for slot, unit in by_value.items() if unit == number) for number in range(len(whole))]
        attention = Attention(
            self.name,
            self._member(slots[queries[0][0]].axis, [[slots[slot].channel for slot in head] for head in queries], seen),
            self._member(slots[keys[0][0]].axis, [[slots[slot].channel for slot in head] for head in keys], seen),
            self._member(slots[values[0][0]].axis, [[slots[slot].channel for slot in head] for head in values], seen)
            if len({len(head) for head in values}) == 1
            else self._member(slots[values[0][0]].axis, [sorted(slots[slot].channel for slot in self.values)], seen),
            (),
        )
        inner, outer = self._sizes(attention)
        attention = replace(attention, sizes=inner)
        result = Candidate(attention, self._kind(), None, None, None, None, outer)
        if len(whole) > 1 and _alike(whole):
            result.heads = self._group("heads", whole, attention, 0, seen)
        shared = {slot for head in keys for slot in head} | self.values
        rows = self._units(without=shared)
        if len(rows) > len(whole) and _alike(rows) and len(rows) % len(whole) == 0:
            homes = [_home(row, whole) for row in rows]
            if None not in homes and len({homes.count(home) for home in homes}) == 1:
                result.queries = self._group("queries", _spread(rows, homes), attention, 1, seen)
        result.keys = self._keys(whole, attention, seen)
        result.values = self._values(whole, by_value, attention, seen)
        return result

    def _keys(self, whole: list[dict[Axis, list[int]]], attention: Attention, seen: Observation) -> Group | None:
        slots = self.flow.slots
        if any(one.pairs is None or len(one.pairs) < 2 for one in self.scores):
            return None
        ordered = [sorted(one.pairs or (), key=lambda pair: pair[1]) for one in self.scores]
        query, key = slots[ordered[0][0][0]].axis, slots[ordered[0][0][1]].axis
        left = [[slots[pair[0]].channel for pair in met] for met in zip(*ordered, strict=True)]
        right = [[slots[pair[1]].channel for pair in met] for met in zip(*ordered, strict=True)]
        product = (self._member(query, left, seen), self._member(key, right, seen))
        units = [_unit([(query, own), (key, other)]) for own, other in zip(left, right, strict=True)]
        group = self._group("keys", units, attention, 2, seen)
        return replace(group, products=(product,))

    def _values(
        self, whole: list[dict[Axis, list[int]]], by_value: Mapping[int, int], attention: Attention, seen: Observation
    ) -> Group | None:
        if not self.single_values or len({list(by_value.values()).count(n) for n in range(len(whole))}) != 1:
            return None
        slots = self.flow.slots
        place = {}
        for number in range(len(whole)):
            own = sorted(slot for slot, unit in by_value.items() if unit == number)
            place.update({slot: rank for rank, slot in enumerate(own)})
        count = max(place.values()) + 1
        parts: list[list[tuple[Axis, list[int]]]] = [[] for _ in range(count)]
        for slot, rank in place.items():
            parts[rank].append((slots[slot].axis, [slots[slot].channel]))
        for axis, numbers in self.readers.items():
            for channel, number in enumerate(numbers):
                slot = next(iter(self.flow.labels[number].direct & self.values))
                parts[place[slot]].append((axis, [channel]))
        units = [_unit(part) for part in parts]
        return self._group("values", units, attention, 2, seen) if count > 1 and _alike(units) else None

    def _slots_of(self, unit: Mapping[Axis, list[int]]) -> set[int]:
        wanted = {(axis, channel) for axis, channels in unit.items() for channel in channels}
        return {slot for slot in self.values if (self.flow.slots[slot].axis, self.flow.slots[slot].channel) in wanted}

    def _group(
        self, what: str, units: Sequence[Mapping[Axis, list[int]]], attention: Attention, level: int, seen: Observation
    ) -> Group:
        members = [
            self._member(axis, [unit[axis] for unit in units], seen) for axis in sorted(units[0], key=self._place)
        ]
        made, carried, read = (tuple(one for one in members if one.side == side) for side in ("out", "both", "in"))
        name = f"{self.name}[{what}]"
        return Group(name, len(units), False, made, carried, read, (), attention, level)

    def _place(self, axis: Axis) -> tuple[int, Axis]:
        """Where in the run its layer works: members of a group come in that order."""
        module = self.modules.get(axis[0])
        return (len(self.order) if module is None else self.order.get(module, len(self.order))), axis

    def _member(self, axis: Axis, channels: Sequence[Sequence[int]], seen: Observation) -> Member:
        index = torch.tensor([list(row) for row in channels], dtype=torch.long)
        if axis in self.flow.lone:
            module, dim = self.flow.lone[axis]
            return Member(axis[0], module, axis[1], index, dim)
        module = self.modules[axis[0]]
        return Member(axis[0], module, axis[1], index, None, seen.sources.get(module))

    # --- attributes ---------------------------------------------------------------------------------------------------

    def _kind(self) -> tuple[object, ...]:
        return tuple(sorted({type(self.modules[name]).__qualname__ for name in self._around()}))

    def _around(self) -> list[str]:
        """Names of the modules that the attention is computed in."""
        layers = {slot_axis[0] for one in self.scores for slot_axis in self._axes_of(one)} | {
            axis[0] for axis in self.readers
        }
        top = _common(layers)
        found = {
            name
            for layer in layers
            for name in _ancestors(layer)
            if name == top or name.startswith(f"{top}." if top else "")
        }
        return sorted(name for name in found if name in self.modules)

    def _axes_of(self, one: Contraction) -> Iterable[Axis]:
        return (self.flow.slots[one.left[0]].axis, self.flow.slots[one.right[0]].axis)

    def _sizes(self, attention: Attention) -> tuple[tuple[HeadSize, ...], tuple[HeadSize, ...]]:
        """Attributes that state sizes of this attention: those that surely do, and those that may."""
        counts = attention.counts({})
        inner: list[HeadSize] = []
        outer: list[HeadSize] = []
        for name in self._around():
            module = self.modules[name]
            if isinstance(module, nn.MultiheadAttention):
                pairs = (("num_heads", "heads"), ("head_dim", "head_dim"), ("value_dim", "value_dim"))
                inner += [HeadSize(name, own, role) for own, role in pairs]
                continue
            own_sizes = head_sizes(module)
            for role, names in HEAD_SIZES.items():
                known = [HeadSize(name, own, role) for own in names if own_sizes.get(own) == counts[role]]
                (outer if role == "outer_width" else inner).extend(known)
        return tuple(inner), tuple(outer)


def _alike(units: Sequence[Mapping[Axis, list[int]]]) -> bool:
    return len({frozenset((axis, len(channels)) for axis, channels in unit.items()) for unit in units}) == 1


def _home(row: Mapping[Axis, list[int]], whole: Sequence[Mapping[Axis, list[int]]]) -> int | None:
    """Which head a part of it belongs to."""
    for number, unit in enumerate(whole):
        if all(set(channels) <= set(unit.get(axis, ())) for axis, channels in row.items()):
            return number
    return None


def _spread(rows: Sequence[Mapping[Axis, list[int]]], homes: Sequence[int | None]) -> list[dict[Axis, list[int]]]:
    """Units with one row of each home."""
    by_home = [[row for row, own in zip(rows, homes, strict=True) if own == home] for home in dict.fromkeys(homes)]
    return [
        _unit([(axis, channels) for row in together for axis, channels in row.items()])
        for together in zip(*by_home, strict=True)
    ]


def _unit(parts: Iterable[tuple[Axis, Sequence[int]]]) -> dict[Axis, list[int]]:
    unit: dict[Axis, set[int]] = {}
    for axis, channels in parts:
        unit.setdefault(axis, set()).update(channels)
    return {axis: sorted(channels) for axis, channels in unit.items()}


def _merged(members: Sequence[Member]) -> tuple[Member, ...]:
    """Those of one side of one layer as one."""
    found: dict[Axis, Member] = {}
    for member in members:
        if member.axis in found:
            index = torch.cat([found[member.axis].index, member.index], 1).sort(1).values
            member = replace(member, index=index)
        found[member.axis] = member
    return tuple(found.values())


def _ancestors(name: str) -> list[str]:
    """The module itself and all that it is in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _common(names: Collection[str]) -> str:
    """The innermost module that has all of these in it."""
    paths = [name.split(".") for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
