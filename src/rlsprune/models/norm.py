"""Batch normalisation as net slimming starts it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["slimming_norm"]


def slimming_norm(norm: _BatchNorm) -> _BatchNorm:
    """Sets the scales to 0.5, as Liu et al. (2017) do.

    With torch's 1 the outputs of 512 normalised nodes are so large that momentum SGD at the paper's learning rate
    diverges on Eq. (15).
    """
    nn.init.constant_(norm.weight, 0.5)
    return norm
