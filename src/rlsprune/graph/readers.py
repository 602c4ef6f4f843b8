"""The layers that read units: ways to change their inputs for a while, and to find those that are not called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rlsprune.graph.groups import Group
from rlsprune.graph.members import Member
from rlsprune.graph.observe import hooked
from rlsprune.model.sizes import is_experts
from rlsprune.model.tensors import complement

__all__ = ["at_readers", "uncalled_in_homes", "uncalled_readers", "without_channels", "zero_channels", "zeroed"]


@contextmanager
def at_readers(
    chosen: Sequence[tuple[Group, Tensor]], change: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Changes the inputs of the layers that read these units, inside the block."""
    columns: dict[nn.Module, list[Tensor]] = {}
    for group, units in chosen:
        for member in group.consumers:
            if is_experts(member.module):
                continue  # they are called with something else
            columns.setdefault(member.module, []).append(member.index[units].flatten())

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(module, inputs[0], torch.cat(columns[module])), *inputs[1:])

    with hooked(columns, before):
        yield


def zero_channels(module: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
    """Returns the input of a linear or convolutional layer with some of its channels zeroed."""
    return zeroed(tensor, _channel_dim(module), channels)


def zeroed(tensor: Tensor, dim: int, entries: Tensor) -> Tensor:
    """Returns a tensor with some entries along a dimension zeroed."""
    return tensor.index_fill(dim, entries.to(tensor.device), 0)


def without_channels(module: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
    """Returns the input of a linear or convolutional layer without some of its channels."""
    dim = _channel_dim(module)
    return tensor.index_select(dim, complement(tensor.shape[dim], channels.to(tensor.device)))


def _channel_dim(module: nn.Module) -> int:
    # Counted from the end, since the batch dimension may be missing.
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1


def uncalled_readers(group: Group, uncalled: Collection[nn.Module]) -> list[Member]:
    """Returns readers that are not called with the units: those in a module that can be made to call them; experts."""
    home = None if group.attention is None else group.attention.fitted
    if home is None:
        return [member for member in group.consumers if is_experts(member.module)]
    return [
        member
        for member in group.consumers
        if isinstance(member.module, nn.Linear) and member.module in uncalled and member.name.startswith(f"{home}.")
    ]


def uncalled_in_homes(
    groups: Sequence[Group], uncalled: Collection[nn.Module], modules: Callable[[str], nn.Module]
) -> dict[nn.Module, list[str]]:
    """Returns module → names, in it, of layers that read heads in its functions, without being called."""
    found: dict[nn.Module, list[str]] = {}
    for group in groups:
        home = None if group.attention is None else group.attention.fitted
        if home is not None and uncalled_readers(group, uncalled):
            layers = modules(home).named_modules()
            found[modules(home)] = [name for name, own in layers if own in uncalled and isinstance(own, nn.Linear)]
    return found
