"""The places of the channels in each kind of layer: tensors, dimensions and attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from rlsprune.model.attention import value_dim
from rlsprune.model.sizes import is_experts, is_transposed_linear

Side = Literal["in", "out", "both"]
"""The channels a layer reads, those it makes, or, where each output channel is made of one input channel, both."""


@dataclass(frozen=True)
class Slab:
    """One tensor of a layer and the dimension of it along which channels lie."""

    tensor: str
    dim: int
    groups: int = 1
    """Number of channels per entry of ``dim``: a grouped convolution stores only ``channels / groups`` entries."""
    offset: int = 0
    """Channel of its first entry: queries, keys and values may have a tensor each."""
    repeats: int = 1
    """Number of entries of each channel, one block of all channels after the other: the gates of a recurrent layer."""

    def entries(self, channels: Tensor, size: int) -> Tensor:
        """Returns the entries, of ``size`` in all, that belong to these channels; leaves out those of other tensors."""
        if self.offset == 0 and self.repeats == 1 and (not len(channels) or int(channels.max()) < size):
            return channels
        span = size // self.repeats
        own = channels[(channels >= self.offset) & (channels < self.offset + span)] - self.offset
        return own if self.repeats == 1 else (torch.arange(self.repeats)[:, None] * span + own).flatten()


@dataclass(frozen=True)
class ModuleAxis:
    """One side of a layer: its number of channels, and what shrinks with them."""

    size: int
    slabs: tuple[Slab, ...]
    attributes: dict[str, int] = field(default_factory=dict)
    """Attribute → divisor: after a cut the attribute is the number of channels left divided by it."""
    blocks: Tensor | None = None
    """(units × k) channels that can only go together inside this layer; None: every channel on its own."""


def is_depthwise(module: nn.Module) -> bool:
    """Whether each output channel of the convolution is made of the input channel with the same number."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def sides(module: nn.Module) -> tuple[Side, ...]:
    """Returns the sides on which channels of this layer can be removed; none for a kind of layer that is left alone."""
    if is_depthwise(module) or isinstance(module, _NormBase | nn.GroupNorm):
        return ("both",)
    if isinstance(module, nn.Linear | _ConvNd) or is_transposed_linear(module) or is_experts(module):
        return ("in", "out")
    if isinstance(module, nn.PReLU):
        # A single slope serves every channel and stays whatever goes.
        return ("both",) if module.num_parameters > 1 else ()
    if isinstance(module, nn.RNNBase):
        return ("in",) if module.proj_size else ("in", "out")
    return ("out",) if isinstance(module, nn.Embedding) else ()


def axis_of(module: nn.Module, side: Side) -> ModuleAxis:
    """Describes one side of a layer.

    Raises:
        ValueError: if the layer has no channels on that side that could be removed.
    """
    if isinstance(module, nn.MultiheadAttention) and side == "out":
        return _attention_axis(module)
    if side not in sides(module):
        raise ValueError(f"{type(module).__name__} has no channels to remove on its {side!r} side")
    if isinstance(module, nn.Linear):
        if side == "in":
            return ModuleAxis(module.in_features, (Slab("weight", 1),), {"in_features": 1})
        return ModuleAxis(module.out_features, (Slab("weight", 0), Slab("bias", 0)), {"out_features": 1})
    if is_transposed_linear(module):
        inputs, outputs = module.weight.shape  # type: ignore[misc]
        if side == "in":
            return ModuleAxis(inputs, (Slab("weight", 0),), {"nx": 1})
        return ModuleAxis(outputs, (Slab("weight", 1), Slab("bias", 0)), {"nf": 1})
    if isinstance(module, _ConvNd):
        return _conv_axis(module, side)
    if isinstance(module, nn.RNNBase):
        return _recurrent_axis(module, side)
    if is_experts(module):
        return _experts_axis(module, side)
    if isinstance(module, nn.GroupNorm):
        each = module.num_channels // module.num_groups
        blocks = torch.arange(module.num_channels).view(module.num_groups, each)
        attributes = {"num_channels": 1, "num_groups": each}
        return ModuleAxis(module.num_channels, (Slab("weight", 0), Slab("bias", 0)), attributes, blocks)
    if isinstance(module, _NormBase):
        slabs = tuple(Slab(name, 0) for name in ("weight", "bias", "running_mean", "running_var"))
        return ModuleAxis(module.num_features, slabs, {"num_features": 1})
    if isinstance(module, nn.PReLU):
        return ModuleAxis(module.num_parameters, (Slab("weight", 0),), {"num_parameters": 1})
    assert isinstance(module, nn.Embedding)
    return ModuleAxis(module.embedding_dim, (Slab("weight", 1),), {"embedding_dim": 1})


def _attention_axis(module: nn.MultiheadAttention) -> ModuleAxis:
    """Describes the queries of all heads, then keys, then values."""
    width, values = module.num_heads * module.head_dim, module.num_heads * value_dim(module)
    parts = [("q_proj_weight", 0, 0), ("k_proj_weight", 0, width), ("v_proj_weight", 0, 2 * width)]
    parts += [("in_proj_weight", 0, 0), ("in_proj_bias", 0, 0), ("bias_k", 2, width), ("bias_v", 2, 2 * width)]
    return ModuleAxis(2 * width + values, tuple(Slab(name, dim, 1, start) for name, dim, start in parts))


def _recurrent_axis(module: nn.RNNBase, side: Side) -> ModuleAxis:
    """Describes what the first layer reads, or the states of all layers and directions, which are equally many."""
    ways = [("", 0)] + ([("_reverse", module.hidden_size)] if module.bidirectional else [])
    if side == "in":
        reading = tuple(Slab(f"weight_ih_l0{way}", 1) for way, _ in ways)
        return ModuleAxis(module.input_size, reading, {"input_size": 1})
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    slabs: tuple[Slab, ...] = ()
    for layer in range(module.num_layers):
        for way, start in ways:
            parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            slabs += tuple(Slab(f"{part}_l{layer}{way}", 0, 1, start, gates) for part in parts)
            slabs += (Slab(f"weight_hh_l{layer}{way}", 1, 1, start),)
            slabs += (Slab(f"weight_ih_l{layer}{way}", 1),) if layer else ()
    size = len(ways) * module.hidden_size
    return ModuleAxis(size, slabs, {"hidden_size": len(ways)}, torch.arange(size).view(len(ways), -1).T)


def _experts_axis(module: nn.Module, side: Side) -> ModuleAxis:
    """Describes the inner width, one for all experts: gates, then what they gate, and the weights that read it."""
    size = module.down_proj.shape[2]  # type: ignore[index]
    assert isinstance(size, int)
    # Kernels of grouped products want rows of whole 16 bytes, in half precision too.
    blocks = torch.arange(size).view(-1, 8) if size % 8 == 0 else None
    if side == "in":
        return ModuleAxis(size, (Slab("down_proj", 2),), {}, blocks)
    return ModuleAxis(size, (Slab("gate_up_proj", 1, repeats=2),), {"intermediate_dim": 1}, blocks)


def _conv_axis(module: _ConvNd, side: Side) -> ModuleAxis:
    if side == "both":
        names = {"in_channels": 1, "out_channels": 1, "groups": 1}
        return ModuleAxis(module.out_channels, (Slab("weight", 0), Slab("bias", 0)), names)
    size = module.in_channels if side == "in" else module.out_channels
    # Ordinary weights are (out, in / groups, …), transposed ones (in, out / groups, …).
    dim = int((side == "in") != module.transposed)
    folded = module.groups if dim == 1 else 1
    slabs = (Slab("weight", dim, folded),) + ((Slab("bias", 0),) if side == "out" else ())
    # Groups must stay equally wide, so a unit is the channel at one offset of every group.
    blocks = torch.arange(size).view(module.groups, -1).T if module.groups > 1 else None
    return ModuleAxis(size, slabs, {f"{side}_channels": 1}, blocks)


def unprunable(module: nn.Module) -> str | None:
    """Returns why the tensors of this layer cannot be cut although its kind can; None if they can."""
    own_sides = ("out",) if isinstance(module, nn.MultiheadAttention) else sides(module)
    if not own_sides or (isinstance(module, nn.RNNBase) and module.proj_size):
        return None
    known = {slab.tensor for side in own_sides for slab in axis_of(module, side).slabs}
    own = {name for name, value in module._parameters.items() if value is not None}
    if "weight" in known and hasattr(module, "weight") and module.weight is not None and "weight" not in own:
        return "its weight is parametrised or masked, not a plain parameter; remove the parametrisation first"
    if own - known:
        return f"it has parameters that {type(module).__name__} does not usually have: {', '.join(sorted(own - known))}"
    if isinstance(module, _ConvNd) and module.groups == module.out_channels != module.in_channels and module.groups > 1:
        return f"it makes {module.out_channels} channels from {module.in_channels} in {module.groups} groups"
    return None


def join(*parts: str) -> str:
    """Joins parts to a dotted name; the root module's own name is empty."""
    return ".".join(part for part in parts if part)
