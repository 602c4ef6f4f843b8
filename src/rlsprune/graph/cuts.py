"""Plans the removal of units: what it means for every tensor and attribute of a network, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsprune.graph.groups import Group, unit_index
from rlsprune.graph.layers import axis_of, join
from rlsprune.graph.members import Axis, Member
from rlsprune.model.sizes import FITTED
from rlsprune.model.tensors import is_sharded, memory_format, placed_like, whole


@dataclass(frozen=True)
class Cuts:
    """A plan. It names everything, so it fits the network and any copy of it with the same structure."""

    units: dict[str, Tensor] = field(default_factory=dict)
    """Name of a group → the units that go, ascending."""
    stay: dict[Axis, Tensor] = field(default_factory=dict)
    """Side of a layer → for each of its channels, whether it stays."""
    tensors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Name of a parameter or buffer → dimension → indices along it that stay."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Name of a parameter or buffer → its shape before the cut."""
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Name of a module → attribute → its value after the cut."""
    factors: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Name of a parameter → dimension, and factors of the entries along it that stay."""

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Returns name of a layer that loses outputs → those of its output channels that stay."""
        return {name: stay.nonzero().flatten() for (name, side), stay in self.stay.items() if side in ("out", "both")}

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a parameter or buffer after the cut."""
        result = cut(tensor, self.tensors[name])
        if name in self.factors:
            dim, factors = self.factors[name]
            shape = [-1 if place == dim else 1 for place in range(result.dim())]
            result = result * factors.to(result).view(shape)
        return result


def plan_cuts(removed: Sequence[tuple[Group, Tensor | Sequence[int]]]) -> Cuts:
    """Plans the removal of units of one or more groups, all numbered as they are now.

    Args:
        removed: Pairs of a group and its units that go.

    Raises:
        ValueError: if a unit does not exist, or a group would lose all.
    """
    cuts = Cuts()
    members: dict[Axis, Member] = {}
    for group, which in removed:
        units = cuts.units[group.name] = unit_index(group, which)
        for member in group.members if len(units) else ():
            if member.axis not in members:
                members[member.axis] = member
                cuts.stay[member.axis] = torch.ones(_channels(member), dtype=torch.bool)
            cuts.stay[member.axis][member.index[units]] = False
        for name in group.fitted if len(units) else ():
            cuts.attributes.setdefault(name, {})[FITTED] = 1
    for axis, member in members.items():
        _cut_member(cuts, member, cuts.stay[axis].nonzero().flatten())
    for attention in {group.attention.name: group.attention for group, _ in removed if group.attention}.values():
        for name, values in attention.attributes(cuts.stay).items():
            cuts.attributes.setdefault(name, {}).update(values)
        cuts.factors.update(attention.factors(cuts.stay))
    return cuts


def cut(tensor: Tensor, dims: dict[int, Tensor]) -> Tensor:
    """Returns a new tensor with only the given indices along the given dimensions, in the memory format of the old.

    The parts of a ``DTensor`` are gathered, and the result is divided again.
    """
    if is_sharded(tensor):
        return placed_like(tensor, cut(whole(tensor), dims))
    result = tensor.detach()
    for dim, keep in dims.items():
        result = result.index_select(dim, keep.to(tensor.device))
    return result.contiguous(memory_format=memory_format(tensor))


def _channels(member: Member) -> int:
    if member.dim is None:
        return axis_of(member.module, member.side).size
    return _lone_parameter(member).shape[member.dim]


def _lone_parameter(member: Member) -> Tensor:
    """Returns the parameter, or buffer, that stands by itself."""
    parameter = {**member.module._buffers, **member.module._parameters}[member.name.rpartition(".")[2]]
    assert parameter is not None
    return parameter


def _cut_member(cuts: Cuts, member: Member, keep: Tensor) -> None:
    if member.dim is not None:
        _cut_tensor(cuts, member.name, _lone_parameter(member), member.dim, keep)
        return
    axis = axis_of(member.module, member.side)
    tensors = {**member.module._buffers, **member.module._parameters}
    for slab in axis.slabs:
        tensor = tensors.get(slab.tensor)
        if tensor is not None:
            # Every group of a grouped convolution keeps the same offsets, so those of the first are enough.
            size = axis.size // slab.groups if slab.groups > 1 else tensor.shape[slab.dim]
            _cut_tensor(cuts, join(member.name, slab.tensor), tensor, slab.dim, slab.entries(keep, size))
    values = {name: len(keep) // divisor for name, divisor in axis.attributes.items()}
    cuts.attributes.setdefault(member.name, {}).update(values)


def _cut_tensor(cuts: Cuts, name: str, tensor: Tensor, dim: int, keep: Tensor) -> None:
    cuts.tensors.setdefault(name, {})[dim] = keep
    cuts.shapes[name] = tensor.shape
