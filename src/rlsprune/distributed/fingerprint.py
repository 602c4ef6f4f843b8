"""Fingerprints of a network and its optimizer: a few numbers that ranks can compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rlsprune.model.tensors import is_sharded

__all__ = ["checksum", "fingerprint"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Returns the sum of a tensor's bits, read as integers; it changes with every single bit."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.dtype.itemsize])
    return int(bits.sum(dtype=torch.int64))


def fingerprint(model: nn.Module, optimizer: Optimizer | None, *, values: bool = True) -> dict[str, Any]:
    """Returns shape and checksum of every parameter and of the optimizer's state for it.

    Args:
        model: The network.
        optimizer: The optimizer, or None for parameters only.
        values: Whether values count, and not only shapes.
    """

    def outline(tensor: Tensor) -> tuple[int, ...]:
        # Each rank has different values of a divided tensor.
        return (*tensor.shape, checksum(tensor)) if values and not is_sharded(tensor) else tuple(tensor.shape)

    prints: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        prints[f"the parameter {name!r}"] = outline(parameter)
        entries = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in entries.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            prints[f"the optimizer's {key!r} of {name!r}"] = [outline(t) for t in tensors]
    return prints
