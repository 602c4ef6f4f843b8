"""Every channel of every layer, numbered, and which of them must go together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from rlsprune.graph.groups import Axis
from rlsprune.graph.layers import axis_of, unprunable


@dataclass
class Slots:
    """Disjoint sets of channels (union-find); a channel of one side of one layer is a slot."""

    start: dict[Axis, int] = field(default_factory=dict)
    sizes: dict[Axis, int] = field(default_factory=dict)
    owner: dict[Axis, tuple[nn.Module, int | None]] = field(default_factory=dict)
    """Axis → its layer; for a parameter that stands by itself, the module that owns it and the dimension."""
    reached: set[int] = field(default_factory=set)
    readings: dict[Axis, list[tuple[int, int]]] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    trouble: dict[int, str] = field(default_factory=dict)
    """Slot → why it has to stay."""

    def add(self, axis: Axis, size: int, module: nn.Module, dim: int | None = None) -> int:
        """Number the channels of an axis, once; returns the number of its first."""
        if axis not in self.start:
            self.start[axis] = len(self.parent)
            self.sizes[axis] = size
            self.owner[axis] = (module, dim)
            self.parent.extend(range(len(self.parent), len(self.parent) + size))
        return self.start[axis]

    def find(self, slot: int) -> int:
        """The representative of the set that this slot is in."""
        while self.parent[slot] != slot:
            self.parent[slot] = self.parent[self.parent[slot]]
            slot = self.parent[slot]
        return slot

    def tie(self, one: int, other: int) -> None:
        """These two go together."""
        low, high = sorted((self.find(one), self.find(other)))
        self.parent[high] = low

    def read(self, axis: Axis, channel: int, by: int) -> None:
        """A linear layer reads this; where the channels lie is settled when all of its inputs are known."""
        self.readings.setdefault(axis, []).append((channel, by))

    def settle_readings(self) -> None:
        """Tie what linear layers read; behind a flatten that went unseen, a channel is a run of inputs."""
        for axis, pairs in self.readings.items():
            start, size = self.start[axis], self.sizes[axis]
            known = len({channel for channel, _ in pairs})
            complete = known == 1 + max(channel for channel, _ in pairs)
            run = size // known if complete and size % known == 0 else 1
            for channel, slot in pairs:
                for place in range(channel * run, (channel + 1) * run):
                    self.tie(slot, start + place)

    def units(self) -> dict[int, dict[Axis, list[int]]]:
        """The sets: representative → axis → channels, ascending."""
        found: dict[int, dict[Axis, list[int]]] = {}
        for axis, start in self.start.items():
            for channel in range(self.sizes[axis]):
                found.setdefault(self.find(start + channel), {}).setdefault(axis, []).append(channel)
        return found

    def reasons(self) -> dict[int, str]:
        """Representative of a set that has to stay → why."""
        found: dict[int, str] = {}
        for slot, why in self.trouble.items():
            found.setdefault(self.find(slot), why)
        return found

    def tie_inside_layers(self) -> None:
        """Grouped convolutions keep equally wide groups, group norms whole groups; odd layers stay whole."""
        for axis, (module, dim) in self.owner.items():
            if dim is not None:
                continue
            start = self.start[axis]
            blocks = axis_of(module, axis[1]).blocks
            for block in blocks.tolist() if blocks is not None else ():
                for channel in block[1:]:
                    self.tie(start + block[0], start + channel)
            why = unprunable(module)
            if why is not None:
                self.trouble[start] = f"{axis[0]} cannot be cut: {why}"
                for channel in range(1, self.sizes[axis]):
                    self.tie(start, start + channel)

    def tie_shared_parameters(self) -> None:
        """A tensor that two layers share is cut for both at once, so its channels go together."""
        first: dict[tuple[int, int], Axis] = {}
        for axis, (module, dim) in self.owner.items():
            slabs = () if dim is not None else axis_of(module, axis[1]).slabs
            for slab in slabs:
                tensor = module._parameters.get(slab.tensor)
                if tensor is None:
                    continue
                other = first.setdefault((id(tensor), slab.dim), axis)
                if other != axis and self.sizes[other] == self.sizes[axis]:
                    for channel in range(self.sizes[axis]):
                        self.tie(self.start[other] + channel, self.start[axis] + channel)
                elif other != axis:
                    self.trouble[self.start[axis]] = f"{axis[0]} and {other[0]} share {slab.tensor} in different ways"
