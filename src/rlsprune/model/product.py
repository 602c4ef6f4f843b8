"""One call of a linear or convolution layer, seen as a matrix product: rows of inputs times a weight matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["Product", "product_of"]

_TRANSPOSED: dict[Callable[..., Any], int] = {
    torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 2,
    torch.conv_transpose3d: 3,
}
_BIASED = {torch.addmm, Tensor.addmm}
_CONVOLUTIONS: dict[Callable[..., Any], int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


@dataclass(frozen=True, eq=False)
class Product:
    """A call, before or after it is made. Row ``i`` of the input matrix belongs to place ``i`` of the output."""

    inputs: Tensor
    """The input as the call got it."""
    weight: Tensor
    bias: Tensor | None
    dims: int = 0
    """Number of dimensions that a convolution moves in; 0 for a linear layer."""
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    """Padding before and after, for each dimension."""
    dilation: tuple[int, ...] = ()
    groups: int = 1
    stuffing: tuple[int, ...] = ()
    """Stride of a transposed convolution, which is an ordinary one over the input with zeros between the pixels."""
    turned: bool = False
    """Whether the weight is (inputs, outputs), as in the ``Conv1D`` of transformers."""

    @property
    def width(self) -> int:
        """Returns the number of inputs of one group: columns of the input matrix."""
        if self.turned:
            return len(self.weight)
        if self.stuffing:
            return len(self.weight) // self.groups * math.prod(self.weight.shape[2:])
        return self.weight[0].numel()

    @property
    def matrix(self) -> Tensor:
        """Returns the weight as a matrix, ``(groups, width, outputs of a group)``."""
        weight = self.weight.detach()
        if self.turned:
            return weight.unsqueeze(0)
        if not self.stuffing:
            return weight.reshape(self.groups, len(weight) // self.groups, -1).mT
        by_group = weight.reshape(self.groups, -1, *weight.shape[1:]).flip(list(range(3, 3 + self.dims)))
        return by_group.movedim(2, -1).flatten(1, -2)

    def weight_of(self, matrix: Tensor) -> Tensor:
        """Inverts `matrix`: returns the weight in its own shape."""
        if self.turned:
            return matrix.squeeze(0)
        if not self.stuffing:
            return matrix.mT.reshape(self.weight.shape)
        inputs, kernel = len(self.weight) // self.groups, self.weight.shape[2:]
        by_group = matrix.reshape(self.groups, inputs, *kernel, -1).movedim(-1, 2)
        return by_group.flip(list(range(3, 3 + self.dims))).reshape(self.weight.shape)

    @property
    def batched(self) -> Tensor:
        """Returns the input with a batch dimension."""
        return self.inputs.unsqueeze(0) if self.dims and self.inputs.dim() == self.dims + 1 else self.inputs

    @property
    def spatial(self) -> tuple[int, ...]:
        """Returns the sizes of the output's places: (batch, …), without channels."""
        if not self.dims:
            return tuple(self.inputs.shape[:-1])
        inputs = self.batched
        places = [(size - 1) * gap + 1 for size, gap in zip(inputs.shape[2:], self._gaps, strict=True)]
        sizes = zip(places, self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        return len(inputs), *((size + sum(pad) - d * (k - 1) - 1) // s + 1 for size, k, s, pad, d in sizes)

    @property
    def _gaps(self) -> tuple[int, ...]:
        return self.stuffing or (1,) * self.dims

    @property
    def places(self) -> int:
        """Returns the number of rows of the input matrix."""
        return math.prod(self.spatial)

    def counted(self, padding: Tensor | None) -> Tensor | None:
        """Returns for each row whether it counts by a mask of tokens; None if the rows are not tokens."""
        if padding is None or self.spatial not in (tuple(padding.shape), (padding.numel(),)):
            return None
        return padding.flatten().bool()

    def rows(self, where: Tensor) -> Tensor:
        """Returns the rows of these places: ``(groups, len(where), width)``."""
        if not self.dims:
            return self.inputs.reshape(-1, self.inputs.shape[-1])[where.to(self.inputs.device)].unsqueeze(0)
        where = where.to(self.inputs.device)
        image, *corners = torch.unravel_index(where, self.spatial)
        chosen, image = torch.unique(image, return_inverse=True)  # not all images have to be padded
        padded = F.pad(
            _stuffed(self.batched[chosen], self._gaps), [size for pair in reversed(self.padding) for size in pair]
        )
        index: list[Tensor | slice] = [image.view(-1, *[1] * self.dims), slice(None)]
        kernel = self.weight.shape[2:]
        for axis, corner in enumerate(corners):
            steps = torch.arange(kernel[axis], device=where.device) * self.dilation[axis]
            taps = corner[:, None] * self.stride[axis] + steps
            index.append(taps.view(-1, *(kernel[axis] if i == axis else 1 for i in range(self.dims))))
        patches = padded[tuple(index)].movedim(-1, 1)  # the indexed dimensions come first, the channels last
        return patches.reshape(len(where), self.groups, self.width).movedim(1, 0)

    def at(self, output: Tensor, where: Tensor) -> Tensor:
        """Returns the entries of a tensor of the output's shape at these places: ``(len(where), channels)``."""
        where = where.to(output.device)
        if not self.dims:
            return output.reshape(-1, output.shape[-1])[where]
        if output.dim() == self.dims + 1:
            output = output.unsqueeze(0)
        image, *rest = torch.unravel_index(where, self.spatial)
        index: list[Tensor | slice] = [image, slice(None), *rest]
        return output[tuple(index)]


def product_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """Returns the call of a linear or convolution function, or of ``addmm``; None for any other function."""
    if function is F.linear:
        inputs, weight, bias = _bound(("input", "weight", "bias"), args, kwargs)
        return Product(inputs, weight, bias)
    if function in _BIASED and kwargs.keys().isdisjoint(("alpha", "beta", "out")):
        bias, inputs, weight = _bound(("input", "mat1", "mat2"), args, kwargs)
        return Product(inputs, weight, bias, turned=True)
    if function in _TRANSPOSED:
        return _transposed(_TRANSPOSED[function], args, kwargs)
    dims = _CONVOLUTIONS.get(function)
    if dims is None:
        return None
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    inputs, weight, bias, stride, padding, dilation, groups = _bound(names, args, kwargs)
    spread = _each(1 if dilation is None else dilation, dims)
    return Product(
        inputs,
        weight,
        bias,
        dims,
        _each(1 if stride is None else stride, dims),
        _padding(0 if padding is None else padding, weight.shape[2:], spread),
        spread,
        1 if groups is None else groups,
    )


def _transposed(dims: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product:
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    inputs, weight, bias, stride, padding, extra, groups, dilation = _bound(names, args, kwargs)
    spread, more, less = (
        _each(default if given is None else given, dims) for given, default in ((dilation, 1), (extra, 0), (padding, 0))
    )
    reach = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
    pads = tuple((size - cut, size - cut + add) for size, cut, add in zip(reach, less, more, strict=True))
    gaps = _each(1 if stride is None else stride, dims)
    return Product(inputs, weight, bias, dims, (1,) * dims, pads, spread, 1 if groups is None else groups, gaps)


def _stuffed(images: Tensor, gaps: Sequence[int]) -> Tensor:
    """Puts zeros between the pixels."""
    if all(gap == 1 for gap in gaps):
        return images
    sizes = [(size - 1) * gap + 1 for size, gap in zip(images.shape[2:], gaps, strict=True)]
    wide = images.new_zeros(*images.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, gap) for gap in gaps))] = images
    return wide


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


def _padding(
    value: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if value == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((size // 2, size - size // 2) for size in total)
    sizes = _each(0 if isinstance(value, str) else value, len(kernel))
    return tuple((size, size) for size in sizes)
