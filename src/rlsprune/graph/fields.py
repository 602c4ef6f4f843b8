"""Fields, which tell for each entry of a tensor the channel that it belongs to.

A *field* is an integer tensor of the shape of the tensor it describes: the number of a channel for each entry, −1 for
none. Where it does not vary it is stretched (stride 0), so that moving it costs next to nothing. Functions that move
entries are applied to fields as they are: reshaping, slicing and shuffling need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsprune.graph.slots import Slots

__all__ = [
    "Labelled",
    "aligned",
    "collapsed",
    "compact",
    "merged",
    "placed",
    "resized",
    "stretched",
    "tidy",
    "varying",
    "vector",
]


@dataclass(frozen=True)
class Labelled:
    """The fields of one tensor."""

    fields: list[Tensor] = field(default_factory=list)
    weight: bool = False
    """Whether it is made of parameters alone."""


def varying(labels: Tensor) -> tuple[int, ...]:
    """Returns the dimensions along which a field varies."""
    return tuple(
        dim for dim, (size, step) in enumerate(zip(labels.shape, labels.stride(), strict=True)) if size > 1 and step
    )


def compact(labels: Tensor) -> Tensor:
    """Returns the field with size 1 along dimensions in which it does not vary."""
    dims = varying(labels)
    return labels[tuple(slice(None) if dim in dims else slice(0, 1) for dim in range(labels.ndim))]


def tidy(labels: Tensor) -> Tensor:
    """Returns the field stretched wherever it does not vary."""
    small = compact(labels)
    for dim, size in enumerate(small.shape):
        first = small.narrow(dim, 0, 1)
        if size > 1 and bool((small == first).all()):
            small = first
    return small.expand(labels.shape)


def stretched(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcasts a field to a shape, as torch broadcasts operands."""
    small = compact(labels)
    return small.reshape((1,) * (len(shape) - small.ndim) + small.shape).expand(shape)


def resized(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Stretches a field to another size where it does not vary."""
    return compact(labels).expand(shape)


def placed(entries: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Makes a field that varies along one dimension."""
    return entries.view([-1 if place == dim else 1 for place in range(len(shape))]).expand(shape)


def aligned(fields: Sequence[Tensor]) -> list[Tensor]:
    """Stretches fields, of sizes that are equal or 1, to the same shape."""
    shape = [max(sizes) for sizes in zip(*(labels.shape for labels in fields), strict=True)]
    return [labels.expand(shape) for labels in fields]


def collapsed(slots: Slots, labels: Tensor, dims: Iterable[int]) -> Tensor:
    """Makes a field constant along some dimensions by tying what differs there; its shape stays."""
    first = labels
    for dim in set(dims) & set(varying(labels)):
        first = first.narrow(dim, 0, 1)
    if first is not labels:
        slots.tie_all(*aligned([compact(labels), compact(first)]))
    return compact(first).expand(labels.shape)


def vector(slots: Slots, labels: Tensor, dim: int) -> Tensor:
    """Returns the channels along one dimension, tied along all others."""
    flat = collapsed(slots, labels, (other for other in range(labels.ndim) if other != dim))
    return flat.movedim(dim, -1).reshape(-1, labels.shape[dim])[0]


def merged(slots: Slots, fields: Iterable[Tensor]) -> list[Tensor]:
    """Merges fields of one shape: those that vary along a common dimension become one, and what meets there is tied."""
    result: list[Tensor] = []
    for labels in fields:
        joined = labels
        rest = []
        for other in result:
            if set(varying(joined)) & set(varying(other)):
                one, two = aligned([compact(other), compact(joined)])
                if not torch.equal(one, two):
                    slots.tie_all(one, two)
                    one = torch.where(one >= 0, one, two)
                joined = one.expand(labels.shape)
            else:
                rest.append(other)
        result = [*rest, joined]
    return result
