"""The layers that RLS preconditions, and the mean input of each, ``(groups, inputs)``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from rlsprune.model.tensors import is_sharded
from rlsprune.optim import functional

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_layer(module: nn.Module) -> TypeGuard[Layer]:
    """Whether RLS knows how to turn the module's input into rows of a matrix."""
    return isinstance(module, _KINDS)


def mean_input(layer: Layer, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Returns a layer's mean input, ``(groups, n)`` with a final 1 for a bias, and the number of rows averaged."""
    if not isinstance(layer, _ConvNd):
        mean = functional.mean_rows(inputs, dtype).unsqueeze(0)
        rows = inputs.numel() // max(inputs.shape[-1], 1)
    else:
        if inputs.dim() == layer.weight.dim() - 1:
            inputs = inputs.unsqueeze(0)
        windows, positions = _windows(layer, inputs.shape[2:], dtype, inputs.device)
        mean = functional.mean_patch(inputs, windows, dtype).reshape(layer.groups, -1)
        rows = inputs.shape[0] * positions
    if layer.bias is not None:
        mean = torch.cat([mean, mean.new_ones(mean.shape[0], 1)], dim=1)
    return mean, rows


def _windows(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, sizes: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], int]:
    # Last dimension first, two numbers each, as F.pad wants them; also resolves padding="same" and "valid".
    pads = layer._reversed_padding_repeated_twice
    axes = zip(sizes, layer.kernel_size, layer.stride, layer.dilation, pads[-2::-2], pads[::-2], strict=True)
    found = [functional.window_weights(*axis, layer.padding_mode, dtype, device) for axis in axes]
    return [window for window, _ in found], math.prod(count for _, count in found)


@dataclass
class LayerSet:
    """A model's parameters as RLS divides them."""

    layers: dict[str, list[Layer]] = field(default_factory=dict)
    """Preconditioned layers by name. Modules that share all their parameters are in one entry."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Layers of a known kind that momentum SGD trains instead, with the reason."""
    others: list[nn.Parameter] = field(default_factory=list)
    """Every other parameter."""


def divide(model: nn.Module) -> LayerSet:
    """Sorts a model's parameters into preconditioned layers and the rest, each parameter exactly once."""
    result = LayerSet()
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)

    taken: dict[tuple[int, int], str] = {}
    for name, module in modules.items():
        if not is_layer(module):
            continue
        if (reason := _obstacle(name, module, modules, owners)) is not None:
            result.left_out[name] = reason
        else:
            first = taken.setdefault((id(module.weight), id(module.bias)), name)
            result.layers.setdefault(first, []).append(module)

    preconditioned = {id(p) for layers in result.layers.values() for p in layers[0].parameters(recurse=False)}
    result.others = [p for p in model.parameters() if id(p) not in preconditioned]
    return result


def _obstacle(name: str, layer: Layer, modules: dict[str, nn.Module], owners: dict[int, list[str]]) -> str | None:
    """Returns why a layer cannot be preconditioned, or None."""
    if parametrize.is_parametrized(layer) or "weight" not in layer._parameters:
        return "its weight is computed from other parameters (a parametrisation)"
    if not layer.weight.numel():
        return "it has no inputs, or no outputs"
    if is_sharded(layer.weight):
        if getattr(layer, "groups", 1) > 1:
            return "fully_shard has divided its groups over the ranks"
        placements = layer.weight.placements  # type: ignore[attr-defined]
        if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
            return "fully_shard has divided its inputs over the ranks: let it divide the outputs (dimension 0)"
    if isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "it is a part of nn.MultiheadAttention, which need not call it: its input is not always seen"
    tied = [modules[other] for p in layer.parameters(recurse=False) for other in owners[id(p)]]
    if any(not is_layer(other) or other.weight is not layer.weight or other.bias is not layer.bias for other in tied):
        return "it shares one of its parameters, but not all of them, with another module"
    return None
