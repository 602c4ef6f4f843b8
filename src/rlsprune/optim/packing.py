"""The optimizer's state of each parameter, and its layout in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsprune.model.tensors import is_sharded

# Entries of `optimizer.state[parameter]`, always checkpointed.
INVERSE = "inverse"  # of a weight: P, as `rlsprune.optim.entries` keeps it
VELOCITY = "velocity"  # of any parameter: Ψ, of its shape

State = Mapping[Tensor, dict[str, Any]]
InverseState = dict[str, Any]
"""The entry of one layer's P; see `rlsprune.optim.entries`."""


def velocity_of(state: State, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the parameter's velocity: zero at first, contiguous, on its device and of the given dtype."""
    velocity: Tensor | None = state[parameter].get(VELOCITY)
    if velocity is None:
        velocity = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    if velocity.dtype != dtype or velocity.device != parameter.device or not velocity.is_contiguous():
        velocity = velocity.to(device=parameter.device, dtype=dtype).contiguous()
    state[parameter][VELOCITY] = velocity
    return velocity


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors along the first dimension; returns a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def pack(containers: Sequence[dict[str, Any]], key: str) -> Tensor:
    """Joins what several containers hold under a key along the first dimension, and returns it as one tensor.

    From then on the containers hold views of it. Tensors that were packed before cost nothing; those that were replaced
    since (by pruning, by loading a state) are packed anew, and so are those whose neighbours have gone.

    Args:
        containers: Dicts with contiguous tensors of equal shape, dtype and device.
        key: Key of the tensor in each of them.
    """
    if len(containers) == 1:
        return unpack(containers[0], key)
    tensors: list[Tensor] = [container[key] for container in containers]
    first, whole = tensors[0], tensors[0]._base
    if (
        whole is not None
        and whole.shape == (len(tensors) * len(first), *first.shape[1:])
        and all(t._base is whole and t.storage_offset() == i * first.numel() for i, t in enumerate(tensors))
    ):
        return whole
    whole = torch.cat(tensors)
    for container, part in zip(containers, torch.split(whole, len(first)), strict=True):
        container[key] = part
    return whole


def unpack(container: dict[str, Any], key: str) -> Tensor:
    """Gives a tensor memory of its own if it is part of a larger piece, which it would keep from being freed."""
    tensor: Tensor = container[key]
    if not is_sharded(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
        container[key] = tensor = tensor.clone()
    return tensor


def unpack_all(state: State, parameters: Iterable[Tensor]) -> None:
    """Gives the state of some parameters memory of its own: their neighbours may be packed anew without them."""
    for entries in (state[p] for p in parameters if p in state):
        for container in (entries, entries.get(INVERSE, {})):
            for key in [key for key, value in container.items() if isinstance(value, Tensor)]:
                unpack(container, key)
