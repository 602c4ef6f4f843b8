"""Networks divided over processes by ``fully_shard``, whose parameters change their shape.

Only this module knows the internals of ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rlsprune.model.tensors import is_sharded, local

__all__ = ["obstacle", "plain_class", "settle", "sharded_modules"]


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules that ``fully_shard`` was called on."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module before ``fully_shard`` put its own in front of it."""
    kind: type[nn.Module] = type(module).__mro__[2]
    return kind


def obstacle(model: nn.Module) -> str | None:
    """Returns why the parameters of a divided network cannot be cut, or None."""
    for name, parameter in model.named_parameters():
        placements = parameter.placements if is_sharded(parameter) else ()  # type: ignore[attr-defined]
        if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
            return f"fully_shard has divided {name!r} along another dimension than its outputs"
    for books in _books(sharded_modules(model)):
        if books.is_dtensor:
            return f"{books} is divided by tensor parallelism too"
    return None


def settle(model: nn.Module) -> None:
    """Lets ``fully_shard`` continue with the parameters as they are now. Call it after they change.

    Parameters that a forward has gathered are given back first. Nothing is communicated.
    """
    modules = sharded_modules(model)
    for module in modules:
        module.reshard()
    for books in _books(modules):
        parameter, dim = books.sharded_param, books.fsdp_placement.dim
        if parameter.shape != books._orig_size:
            own = local(parameter)
            meta = torch.empty(parameter.shape, device="meta")
            books._orig_size, books._contiguous_orig_stride = parameter.shape, meta.stride()
            books.sharded_size = own.shape if own.numel() else _with_size(parameter.shape, dim, 0)
            books.contiguous_sharded_stride = torch.empty(books.sharded_size, device="meta").stride()
            largest = -(-parameter.shape[dim] // _ways(parameter))
            books.padded_sharded_param_size = _with_size(parameter.shape, dim, largest)
            if books.post_forward_mesh_info:
                books._init_sharded_post_forward_param_metadata(meta)
            # The buffers that a forward gathers into have the old size.
            books.all_gather_outputs = []
            if hasattr(books, "_unsharded_param"):
                del books._unsharded_param
        books.reset_sharded_param()


def _books(modules: Iterable[Any]) -> Iterator[Any]:
    """Yields what ``fully_shard`` keeps of each parameter of the modules that it was called on."""
    for module in modules:
        state = module._get_fsdp_state()
        # One group a module until torch 2.10 or so, several since.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            yield from () if group is None else group.fsdp_params


def _ways(parameter: Any) -> int:
    """Returns the number of processes over which a parameter is divided."""
    sizes = [parameter.device_mesh.size(dim) for dim, kind in enumerate(parameter.placements) if kind.is_shard()]
    return sizes[0] if sizes else 1


def _with_size(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
