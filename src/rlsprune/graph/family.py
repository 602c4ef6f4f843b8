"""One attention as one run showed it: its scores, the layers that read its heads, and what is tied together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn

from rlsprune.graph.contractions import Contraction
from rlsprune.graph.flow import Flow
from rlsprune.graph.heads import HeadSize
from rlsprune.graph.labels import EVERYTHING
from rlsprune.graph.layers import unprunable
from rlsprune.graph.members import Axis
from rlsprune.graph.parts import common_module
from rlsprune.model.sizes import HEAD_SIZES, head_sizes

__all__ = ["Family", "HeadUnit", "find_families"]

HeadUnit = dict[Axis, list[int]]
"""Channels that are tied together: side of a layer → its channels, ascending."""
_Node = int | tuple[Axis, int]
"""A slot, or an input of a layer that reads heads."""


def find_families(flow: Flow, modules: Mapping[str, nn.Module]) -> Iterator[Family]:
    """Yields a family for each pair of a query and a key layer; without readers where no layer reads their heads."""

    def layers(one: Contraction) -> tuple[Axis, Axis]:
        return flow.slots[one.left[0]].axis, flow.slots[one.right[0]].axis

    ordered = sorted(flow.contractions, key=lambda one: (layers(one), one.left, one.right))
    for axes, family in groupby(ordered, layers):
        if flow.lone.keys().isdisjoint(axes):
            yield Family(flow, list(family), modules)


@dataclass
class Family:
    """One attention."""

    flow: Flow
    scores: list[Contraction]
    modules: Mapping[str, nn.Module]
    trouble: str | None = None
    """Reason why its heads have to stay."""
    common: set[int] = field(default_factory=set)
    """Slots that all heads use alike."""
    values: set[int] = field(default_factory=set)
    """Slots of the layer that makes the values."""
    readers: dict[Axis, list[int]] = field(default_factory=dict)
    """Inputs of the layers that read these heads and nothing else → the label of each."""

    def __post_init__(self) -> None:
        queries = {slot for one in self.scores for slot in one.left}
        for axis, numbers in self.flow.reads.items():
            mine = {not queries.isdisjoint(scores) for scores in self.flow.weighed[axis]}
            if True in mine:
                self.readers[axis] = numbers
                if False in mine or EVERYTHING in numbers:
                    self.trouble = f"{axis[0]} reads its heads and other channels too"
        self.name = next(self.names())
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
        labels = {self.flow.labels[number] for numbers in self.readers.values() for number in set(numbers)}
        own = {scores: {keys[slot] for slot in scores if slot in keys} for scores in {one.scores for one in labels}}
        for slots, scores in {*((one.direct, one.scores) for one in labels), *((scores, scores) for scores in own)}:
            for slot in slots:
                if self.flow.slots[slot].axis in self.flow.lone:
                    heads.setdefault(slot, set()).update(own[scores])
        axes = {self.flow.slots[slot].axis for slot, own in heads.items() if len(own) > 1}
        self.common = {slot for slot in heads if self.flow.slots[slot].axis in axes}

    def _set_values(self) -> None:
        """Finds the layer that makes the values."""
        slots = self.flow.slots
        direct = [self.flow.labels[number].direct for numbers in self.readers.values() for number in numbers]
        lone = {slot for label in direct for slot in label if slots[slot].axis in self.flow.lone}
        values = {slot for label in direct for slot in label} - lone
        if len({slots[slot].axis for slot in values}) != 1:
            self.trouble = "its values do not come from one layer"
            return
        self.values = values

    # --- what hangs together ------------------------------------------------------------------------------------------

    def names(self) -> Iterator[str]:
        """Yields the name of the module that has the query and key layers, and others if it has several attentions."""
        queries, keys = (self.flow.slots[side[0]].axis[0] for side in (self.scores[0].left, self.scores[0].right))
        if queries != keys:
            yield common_module({queries, keys}) or min(queries, keys)
        elif not isinstance(self.modules[queries], nn.MultiheadAttention):
            yield queries.rpartition(".")[0] or queries
        yield from (queries, keys, f"{queries} and {keys}")

    def kept(self, ignore: Collection[str]) -> str | None:
        """Returns why all heads stay although they could go, or None."""
        names = {slot_axis[0] for slot_axis in self.axes()}
        named = sorted(names & set(ignore))
        if named or self.name in ignore:
            return f"{', '.join(named) or self.name} is named in ignore"
        for name in sorted(names | {axis[0] for axis in self.readers}):
            if name in self.modules and (why := unprunable(self.modules[name])) is not None:
                return f"{name} cannot be cut: {why}"
        return None

    def axes(self) -> set[Axis]:
        """Returns the sides of layers, and lone parameters, that its heads are made of."""
        numbers = {number for numbers in self.readers.values() for number in numbers}
        labels = [self.flow.labels[number] for number in numbers]
        sets = {part for label in labels for part in label}  # all inputs of one head have the same scores behind them
        return {self.flow.slots[slot].axis for slot in set[int]().union(*sets) - self.common}

    def units(self, without: Collection[int] = ()) -> list[HeadUnit]:
        """Returns the sets of channels that are tied together, leaving out some slots: axis → channels, ascending."""
        parent: dict[_Node, _Node] = {}

        def find(node: _Node) -> _Node:
            parent.setdefault(node, node)
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        kept = frozenset(self.common.union(without))
        tied: set[frozenset[int]] = set()
        for axis, numbers in self.readers.items():
            for channel, number in enumerate(numbers):
                label = self.flow.labels[number]
                scores = sorted(label.scores - kept)
                # All inputs of one head have the same scores behind them: they are tied once.
                more = scores[:1] if label.scores in tied else scores
                tied.add(label.scores)
                for slot in (*more, *(label.direct - kept)):
                    parent[find(slot)] = find((axis, channel))
        units: dict[_Node, HeadUnit] = {}
        for node in list(parent):
            axis, channel = (
                node if isinstance(node, tuple) else (self.flow.slots[node].axis, self.flow.slots[node].channel)
            )
            units.setdefault(find(node), {}).setdefault(axis, []).append(channel)
        found = [{axis: sorted(channels) for axis, channels in unit.items()} for unit in units.values()]
        first = next(iter(self.readers))
        return sorted(found, key=lambda unit: unit.get(first, []))

    # --- attributes ---------------------------------------------------------------------------------------------------

    def kind(self) -> tuple[str, ...]:
        """Returns a key that is equal for attentions that the same code computes."""
        return tuple(sorted({type(self.modules[name]).__qualname__ for name in self._around()}))

    def home(self) -> str | None:
        """Returns the innermost module that the attention is computed in, if it knows how many heads it has."""
        name = common_module(self._layers())
        module = self.modules.get(name)
        known = module is not None and not isinstance(module, nn.MultiheadAttention) and head_sizes(module)
        return name if known else None

    def _layers(self) -> set[str]:
        """Returns the names of the layers that make queries and keys, and that read heads."""
        slots = [slot for one in self.scores for slot in (one.left[0], one.right[0])]
        return {self.flow.slots[slot].axis[0] for slot in slots} | {axis[0] for axis in self.readers}

    def _around(self) -> list[str]:
        """Returns the names of the modules that the attention is computed in."""
        layers = self._layers()
        top = common_module(layers)
        found = {
            name
            for layer in layers
            for name in _ancestors(layer)
            if name == top or name.startswith(f"{top}." if top else "")
        }
        return sorted(name for name in found if name in self.modules)

    def sizes(self, counts: Mapping[str, int]) -> tuple[tuple[HeadSize, ...], tuple[HeadSize, ...]]:
        """Returns attributes that state sizes of this attention: those that surely do, and those that may."""
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


def _ancestors(name: str) -> list[str]:
    """Returns the names of a module and of all that it is in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
