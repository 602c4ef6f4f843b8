"""What removing units means for every tensor and attribute of a network, by name and without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsprune._tensors import complement, memory_format
from rlsprune.graph.groups import Group, Member, removed_channels, unit_index
from rlsprune.graph.layers import axis_of, join


@dataclass(frozen=True)
class Cuts:
    """A plan. It names everything, so it fits the network and any copy of it with the same structure."""

    tensors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Name of a parameter or buffer → dimension → indices along it that stay."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Name of a parameter or buffer → its shape before the cut."""
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Name of a module → attribute → its value after the cut."""


def plan_cuts(removed: Sequence[tuple[Group, Tensor | Sequence[int]]]) -> Cuts:
    """Plan the removal of units of one or more groups, all numbered as they are now.

    Args:
        removed: Pairs of a group and its units that go.

    Raises:
        ValueError: if a unit does not exist, or a group would lose all.
    """
    units = [(group, unit_index(group, which)) for group, which in removed]
    gone = removed_channels(units)
    members = {member.axis: member for group, _ in units for member in group.members}
    cuts = Cuts()
    for axis, channels in gone.items():
        _cut_member(cuts, members[axis], channels)
    return cuts


def cut(tensor: Tensor, dims: dict[int, Tensor]) -> Tensor:
    """A new tensor with only the given indices along the given dimensions, in the memory format of the old."""
    result = tensor.detach()
    for dim, keep in dims.items():
        result = result.index_select(dim, keep.to(tensor.device))
    return result.contiguous(memory_format=memory_format(tensor))


def _cut_member(cuts: Cuts, member: Member, gone: Tensor) -> None:
    if member.dim is not None:
        parameter = member.module._parameters[member.name.rpartition(".")[2]]
        assert parameter is not None
        _cut_tensor(cuts, member.name, parameter, member.dim, complement(parameter.shape[member.dim], gone))
        return
    axis = axis_of(member.module, member.side)
    keep = complement(axis.size, gone)
    for slab in axis.slabs:
        tensor = {**member.module._buffers, **member.module._parameters}.get(slab.tensor)
        if tensor is not None:
            # Every group of a grouped convolution keeps the same offsets: those of the first say it all.
            entries = keep[keep < axis.size // slab.groups]
            _cut_tensor(cuts, join(member.name, slab.tensor), tensor, slab.dim, entries)
    values = cuts.attributes.setdefault(member.name, {})
    values.update({name: len(keep) // divisor for name, divisor in axis.attributes.items()})


def _cut_tensor(cuts: Cuts, name: str, tensor: Tensor, dim: int, keep: Tensor) -> None:
    cuts.tensors.setdefault(name, {})[dim] = keep
    cuts.shapes[name] = tensor.shape
