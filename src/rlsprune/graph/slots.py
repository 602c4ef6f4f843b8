"""Numbers of all channels of all layers, and the sets of those that must go together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlsprune.graph.layers import Side, axis_of, unprunable

Place = tuple[str, Side, int | None]
"""One side of one layer; for a parameter that stands by itself, its name and one of its dimensions."""


@dataclass
class Slots:
    """Disjoint sets of channels (union-find); a channel of one side of one layer is a slot."""

    start: dict[Place, int] = field(default_factory=dict)
    sizes: dict[Place, int] = field(default_factory=dict)
    owner: dict[Place, nn.Module] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    trouble: dict[int, str] = field(default_factory=dict)
    """Slot → reason why it has to stay."""
    grids: list[Tensor] = field(default_factory=list)
    """Channels that were laid out as rows and columns, and have to stay a rectangle."""

    def add(self, place: Place, size: int, module: nn.Module) -> Tensor:
        """Numbers the channels of a place, once, and returns their numbers."""
        if place not in self.start:
            self.start[place] = len(self.parent)
            self.sizes[place] = size
            self.owner[place] = module
            self.parent.extend(range(len(self.parent), len(self.parent) + size))
        return self.numbers(place)

    def numbers(self, place: Place) -> Tensor:
        """Returns the slots of a place, in order."""
        return torch.arange(self.start[place], self.start[place] + self.sizes[place])

    def find(self, slot: int) -> int:
        """Returns the representative of the set that this slot is in."""
        while self.parent[slot] != slot:
            self.parent[slot] = self.parent[self.parent[slot]]
            slot = self.parent[slot]
        return slot

    def tie(self, one: int, other: int) -> None:
        """Makes two slots go together."""
        one, other = self.find(one), self.find(other)
        self.parent[max(one, other)] = min(one, other)

    def tie_all(self, ones: Tensor, others: Tensor) -> None:
        """Ties each slot to its counterpart; −1 is no channel."""
        pairs = torch.stack([ones.reshape(-1), others.reshape(-1)])
        pairs = pairs[:, (pairs[0] != pairs[1]) & (pairs >= 0).all(0)]
        if pairs.shape[1] > 4096:
            pairs = torch.unique(pairs, dim=1)
        for one, other in zip(*pairs.tolist(), strict=True):
            self.tie(one, other)

    def keep(self, labels: Tensor, why: str) -> None:
        """Marks slots that have to stay; the first reason given counts."""
        for slot in torch.unique(labels).tolist():
            if slot >= 0:
                self.trouble.setdefault(slot, why)

    def settle(self) -> None:
        """Ties grids so that they stay rectangles: whole rows or whole columns go, by default the same of every row."""
        for grid in self.grids:
            # What is settled stays so: ties only join sets.
            sets = torch.tensor([self.find(slot) if slot >= 0 else -1 for slot in grid.flatten().tolist()])
            sets = sets.view(grid.shape)
            if not any(_only_along(sets, dim) for dim in range(sets.ndim)):
                rows = grid.reshape(-1, grid.shape[-1])
                self.tie_all(rows, rows[:1].expand(rows.shape))

    def units(self) -> dict[int, dict[Place, list[int]]]:
        """Returns the sets: representative → place → channels, ascending."""
        found: dict[int, dict[Place, list[int]]] = {}
        sets = self._representatives()
        for place, start in self.start.items():
            for channel, representative in enumerate(sets[start : start + self.sizes[place]]):
                found.setdefault(representative, {}).setdefault(place, []).append(channel)
        return found

    def _representatives(self) -> list[int]:
        """Returns `find` of every slot."""
        sets = torch.tensor(self.parent, dtype=torch.long)
        while not torch.equal(further := sets[sets], sets):
            sets = further
        return sets.tolist()

    def reasons(self) -> dict[int, str]:
        """Returns representative of a set that has to stay → reason."""
        found: dict[int, str] = {}
        for slot, why in self.trouble.items():
            found.setdefault(self.find(slot), why)
        return found

    def tie_inside_layers(self) -> None:
        """Ties channels so that grouped convolutions keep equal groups, group norms whole groups, odd layers all."""
        for place, module in self.owner.items():
            name, side, dim = place
            if dim is not None:
                continue
            blocks = axis_of(module, side).blocks
            if blocks is not None:
                slots = self.start[place] + blocks
                self.tie_all(slots, slots[:, :1].expand(slots.shape))
            why = unprunable(module)
            if why is not None:
                whole = self.numbers(place)
                self.keep(whole, f"{name} cannot be cut: {why}")
                self.tie_all(whole, whole[:1].expand(whole.shape))

    def tie_shared_parameters(self) -> None:
        """Ties the channels of a tensor that two layers share, since it is cut for both at once."""
        first: dict[tuple[int, int], Place] = {}
        for place, module in self.owner.items():
            name, side, dim = place
            for slab in () if dim is not None else axis_of(module, side).slabs:
                tensor = module._parameters.get(slab.tensor)
                if tensor is None:
                    continue
                other = first.setdefault((id(tensor), slab.dim), place)
                if other != place and self.sizes[other] == self.sizes[place]:
                    self.tie_all(self.numbers(other), self.numbers(place))
                elif other != place:
                    self.keep(self.numbers(place), f"{name} and {other[0]} share {slab.tensor} in different ways")


def _only_along(sets: Tensor, dim: int) -> bool:
    """Whether the sets differ along one dimension alone."""
    first = sets
    for other in range(sets.ndim):
        first = first if other == dim else first.narrow(other, 0, 1)
    return bool((sets == first).all())
