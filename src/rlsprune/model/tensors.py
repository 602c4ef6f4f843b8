"""Small functions on tensors that several modules need."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available


def tensors_in(values: object) -> list[Tensor]:
    """Returns every tensor in the arguments or results of a torch function, also in its lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    return [leaf for value in values for leaf in tensors_in(value)] if isinstance(values, list | tuple) else []


def complement(size: int, gone: Tensor) -> Tensor:
    """Returns the indices below ``size`` that are not in ``gone``, ascending."""
    mask = torch.ones(size, dtype=torch.bool, device=gone.device)
    mask[gone] = False
    return mask.nonzero().flatten()


def sub_matrix(matrix: Tensor, stay: Tensor) -> Tensor:
    """Returns some rows of a square matrix, with the same columns only."""
    return matrix.index_select(0, stay).index_select(1, stay)


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Returns the memory format of a tensor: channels last, or contiguous."""
    candidates = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.ndim in candidates and not tensor.is_contiguous():
        wanted = candidates[tensor.ndim]
        if tensor.is_contiguous(memory_format=wanted):
            return wanted
    return torch.contiguous_format


def exact(tensor: Tensor) -> Tensor:
    """Returns the tensor in float64, on the CPU where its device has none."""
    return tensor.to(torch.device("cpu") if tensor.device.type == "mps" else tensor.device).double()


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which autocast does nothing."""
    on = is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def wait_for(device: torch.device) -> None:
    """Blocks until queued work has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of the tensor (a ``DTensor``, of ``fully_shard``)."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this process has: all of it, except of a ``DTensor``."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor. Gathers the parts of a ``DTensor``, so all processes must call it together."""
    full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def placed_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Divides a tensor of the parameter's shape over the processes as the parameter is."""
    if not is_sharded(parameter) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    placed: Tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return placed


def forget_compiled_code() -> None:
    """Lets ``torch.compile`` start afresh, if it was used at all.

    Compiled code neither sees hooks that were added since nor shapes that changed, and after a few recompilations it
    gives up in silence.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Gives a parameter or buffer new data, of any shape, and drops its gradient.

    A loss that is still alive keeps the gradient accumulator of the old shape alive, and the next backward would use
    it and fail. Data of another dtype makes autograd forget it; hooks are kept elsewhere and survive.

    A parameter divided by ``fully_shard`` gets a part of the data, and `rlsprune.model.sharded.settle` tells
    ``fully_shard`` about it.
    """
    tensor.grad = None
    if is_sharded(tensor):
        # A DTensor is not only its data: the parameter stays the same object, and its contents are exchanged.
        new = nn.Parameter(placed_like(tensor, data).detach(), requires_grad=tensor.requires_grad)
        own = dict(vars(tensor))
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
        vars(tensor).update(own)
        return
    if tensor.requires_grad:
        other = torch.float32 if data.dtype == torch.float64 else torch.float64
        # Metal has no float64, and any other floating dtype serves.
        tensor.data = torch.empty(0, dtype=torch.float16 if data.device.type == "mps" else other, device=data.device)
    tensor.data = data


def host_waits(device: torch.device) -> bool:
    """Whether looking at a value on this device makes the host wait for it."""
    return device.type != "cpu"


def all_finite(gradients: list[Tensor]) -> Tensor:
    """Whether all entries of each gradient are finite (and below 1e19, whose square is not)."""
    dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, dtype=dtype)).isfinite()
