"""A warning about columns of very different scales that a layer reads."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from rlsprune.model.tensors import host_waits

__all__ = ["warn_of_scales"]

_LARGE = 100.0  # a root mean square at which steps along that column leave nothing for others
_APART = 1e3  # the largest over the least


@torch.no_grad()
def warn_of_scales(layer: nn.Module, inputs: Tensor) -> None:
    """Warns if a linear layer reads raw columns, some of which are large and a thousand times larger than others.

    It looks only at inputs that no other layer has computed, and only on the CPU: elsewhere the host would wait.
    """
    if not isinstance(layer, nn.Linear) or inputs.requires_grad or inputs.ndim != 2 or host_waits(inputs.device):
        return
    sizes = inputs.float().square().mean(0).sqrt()
    largest, least = float(sizes.max()), float(sizes.where(sizes > 0, torch.inf).min())
    if largest >= _LARGE and largest >= _APART * least:
        columns = f"columns {int(sizes.argmax())} and {int(sizes.where(sizes > 0, torch.inf).argmin())}"
        warnings.warn(
            f"{layer} reads columns of very different scales, from {least:.3g} to {largest:.3g} ({columns}): training "
            "will make little progress and nothing will be pruned; standardise them first, (x - x.mean(0)) / x.std(0)",
            stacklevel=2,
        )
