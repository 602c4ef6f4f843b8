"""Rows of a layer's input matrix, which its weight matrix is multiplied with, drawn from a batch."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rlsprune.model.sizes import is_transposed_linear
from rlsprune.model.tensors import whole
from rlsprune.optim.layers import Layer, is_layer

# Patches cut from one image, so that not all images of a batch have to be padded.
_PATCHES = 8


def has_rows(module: nn.Module) -> TypeGuard[Layer]:
    """Whether a module multiplies rows by a matrix: layers that RLS preconditions, and transformers' ``Conv1D``."""
    return is_layer(module) or is_transposed_linear(module)


def input_count(layer: nn.Module) -> int:
    """Returns the number of inputs of one group of a layer: rows of its weight matrix, without the bias's."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return len(weight) if is_transposed_linear(layer) else math.prod(weight.shape[1:])


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or is_transposed_linear(layer)


def sample_rows(
    layer: Layer, inputs: Tensor, count: int, generator: torch.Generator, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, int]:
    """Samples at most ``count`` random rows of the input matrix.

    Args:
        layer: A Linear layer (rows are its inputs) or a convolution (rows are patches).
        inputs: One batch of its input.
        count: Largest number of rows.
        generator: Random generator on the CPU, so that the draw is the same on every device.
        rank: Rank whose batch this is. The rows are drawn from the batches of all ranks as if they were one, and those
            of this rank are returned.
        ranks: Number of ranks.

    Returns:
        The rows, ``(groups, rows, n)``, without the bias's 1; and the number drawn on all ranks together.
    """
    if _is_linear(layer):
        rows = inputs.reshape(-1, inputs.shape[-1])
        drawn = min(count, ranks * len(rows))
        if ranks * len(rows) > count:
            _, own = _of_rank(_draw(ranks * len(rows), count, generator), rank, len(rows))
            rows = rows[own.to(rows.device)]
        return rows.clone().unsqueeze(0), drawn
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if inputs.dim() == 1 + len(layer.kernel_size):  # not weight.dim(): a look at a spectral norm's weight changes it
        inputs = inputs.unsqueeze(0)
    chosen = _draw(ranks * len(inputs), max(1, count // _PATCHES), generator)
    places, own = _of_rank(chosen, rank, len(inputs))
    if len(own) < len(inputs):
        inputs = inputs[own.to(inputs.device)]
    return _patches(layer, inputs, count, generator, places, len(chosen))


def _patches(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    images: Tensor,
    count: int,
    generator: torch.Generator,
    places: Tensor,
    total: int,
) -> tuple[Tensor, int]:
    """Draws patches from ``total`` images, of which those at ``places`` are here."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = nn.functional.pad(images, layer._reversed_padding_repeated_twice, mode=mode)
    settings = list(zip(padded.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True))
    positions = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in settings]
    picks = _draw(total * math.prod(positions), count, generator)
    image, *corners = torch.unravel_index(picks, (total, *positions))
    if len(places) < total:
        here = torch.full((total,), -1).index_put((places,), torch.arange(len(places)))[image]
        image, corners = here[here >= 0], [corner[here >= 0] for corner in corners]
    image, corners = image.to(images.device), [corner.to(images.device) for corner in corners]
    index: list[Tensor | slice] = [image.view(-1, *[1] * len(corners)), slice(None)]
    for axis, (corner, (_, kernel, stride, dilation)) in enumerate(zip(corners, settings, strict=True)):
        taps = corner[:, None] * stride + torch.arange(kernel, device=images.device) * dilation
        index.append(taps.view(-1, *(kernel if i == axis else 1 for i in range(len(corners)))))
    patches = padded[tuple(index)].movedim(-1, 1)  # the indexed dimensions come first, the channels last
    return patches.reshape(len(image), layer.groups, -1).movedim(1, 0).contiguous(), len(picks)


def _of_rank(picks: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the places of one rank's items in a draw from equal batches, and their indices in its batch."""
    places = ((picks >= rank * size) & (picks < (rank + 1) * size)).nonzero().flatten()
    return places, picks[places] - rank * size


def _draw(population: int, count: int, generator: torch.Generator) -> Tensor:
    """Draws different numbers below ``population``; all of them if there are not more than ``count``."""
    if population <= count:
        return torch.arange(population)
    if population < 4 * count:
        return torch.randperm(population, generator=generator)[:count]
    drawn: Tensor = torch.unique(torch.randint(population, (2 * count,), generator=generator))
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


def input_rows(layer: nn.Module, channels: Tensor) -> Tensor:
    """Returns the rows of P that belong to given input channels of a layer.

    Args:
        layer: A Linear layer or a convolution, ordinary or transposed.
        channels: ``(units, k)`` input channels (features of a Linear layer), ascending in each unit, equally many in
            every group of a grouped convolution.

    Returns:
        ``(groups, units, rows per unit)``, counted within the group.
    """
    if _is_linear(layer):
        return channels.unsqueeze(0)
    assert isinstance(layer, _ConvNd)
    taps = math.prod(layer.kernel_size)
    by_group = channels.view(len(channels), layer.groups, -1) % (layer.in_channels // layer.groups)
    rows = by_group.unsqueeze(-1) * taps + torch.arange(taps)
    return rows.flatten(2).movedim(1, 0)


def weight_matrix(layer: Layer) -> Tensor:
    """Returns the weight as in the paper, ``(groups, n, out per group)``, with the bias as last row; never half.

    The result is a transposed view of memory that is laid out as the weight is.
    """
    groups, dtype = getattr(layer, "groups", 1), torch.promote_types(layer.weight.dtype, torch.float32)
    weight = whole(layer.weight.detach()).to(dtype)
    weight = weight.mT if is_transposed_linear(layer) else weight
    matrix = weight.reshape(groups, len(weight) // groups, -1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, whole(layer.bias.detach()).to(dtype).view(groups, -1, 1)], dim=2)
    return matrix.mT


def split_matrix(layer: Layer, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inverts `weight_matrix`: returns weight and bias in their own shapes and dtypes."""

    def of(parameter: Tensor, values: Tensor) -> Tensor:
        return values.reshape(parameter.shape).to(parameter.device, parameter.dtype)

    weight = matrix if layer.bias is None else matrix[:, :-1]
    weight = of(layer.weight, weight if is_transposed_linear(layer) else weight.mT)
    return weight, None if layer.bias is None else of(layer.bias, matrix[:, -1])
