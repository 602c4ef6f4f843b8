"""Makes groups of the channels that go together, as one run of the network showed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from rlsprune.graph.groups import Group
from rlsprune.graph.labelling import Labelling
from rlsprune.graph.layers import Side
from rlsprune.graph.members import Member
from rlsprune.graph.observe import Observation
from rlsprune.graph.slots import Place
from rlsprune.model.collector import without_collector

Unit = dict[Place, list[int]]
"""Channels that go together: place → its channels."""


@without_collector()
def trace_groups(
    labelling: Labelling, seen: Observation, ignore: Collection[str]
) -> tuple[list[Group], dict[str, str]]:
    """Makes the groups of a network, not verified yet.

    Returns:
        The groups in the order in which the network runs, and name → reason of those that must be left alone.
    """
    slots, order = labelling.slots, labelling.order
    reasons = slots.reasons()
    by_places: dict[tuple[Place, ...], list[tuple[int, Unit]]] = {}
    for representative, unit in slots.units().items():
        by_places.setdefault(tuple(unit), []).append((representative, unit))
    alike: dict[Any, list[Unit]] = {}
    for places, found in by_places.items():
        if _producers(places, slots.owner, order):
            twice = _twice(places)
            for representative, unit in found:
                shape = tuple(len(channels) for channels in unit.values())
                alike.setdefault((places, shape, reasons.get(representative) or twice), []).append(unit)

    def position(item: tuple[Any, list[Unit]]) -> tuple[int, list[int]]:
        unit = item[1][0]
        first = _producers(unit, slots.owner, order)[0]
        return order[slots.owner[first]], unit[first]

    groups: list[Group] = []
    skipped: dict[str, str] = {}
    taken: dict[str, int] = {}
    for (_, _, reason), units in sorted(alike.items(), key=position):
        first = _producers(units[0], slots.owner, order)[0][0]
        count = taken[first] = taken.get(first, -1) + 1
        name = first + (f"[{count}]" if count else "")
        by_side: dict[Side, list[Member]] = {"out": [], "both": [], "in": []}
        for place in sorted(units[0], key=lambda place: (order.get(slots.owner[place], len(order)), place[:2])):
            own, side, dim = place
            index = torch.tensor([unit[place] for unit in units], dtype=torch.long)
            module = slots.owner[place]
            by_side[side].append(Member(own, module, side, index, dim, seen.sources.get(module)))
        made, carried, read = (tuple(by_side[side]) for side in ("out", "both", "in"))
        group = Group(name, len(units), False, made, carried, read)
        why = reason or _whole(group, ignore)
        if why is None:
            groups.append(group)
        else:
            skipped[name] = why
    return groups, skipped


def _producers(
    places: Iterable[Place], owner: Mapping[Place, nn.Module], order: Mapping[nn.Module, int]
) -> list[Place]:
    """Returns the places of the layers that ran and make these channels, in their order."""
    made = [place for place in places if place[1] == "out" and owner[place] in order]
    return sorted(made, key=lambda place: order[owner[place]])


def _twice(places: Iterable[Place]) -> str | None:
    tables = [name for name, _, dim in places if dim is not None]
    name = next((name for name in tables if tables.count(name) > 1), None)
    return f"its channels lie along two dimensions of {name}" if name is not None else None


def _whole(group: Group, ignore: Collection[str]) -> str | None:
    """Returns why a group must stay whole although its layers could be cut, or None."""
    kept = [member.name for member in group.producers + group.carriers if member.name in ignore]
    if kept:
        return f"{', '.join(kept)} is named in ignore"
    width = group.producers[0].index.numel()
    if width == 1:
        return "it has a single channel"
    if not group.consumers:
        return "no layer was seen to read its channels"
    if group.size < 2:
        return f"its {width} channels are all tied together (by groups of a convolution or norm), so none can go alone"
    return None
