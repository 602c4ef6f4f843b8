"""The fully-connected network of the paper's first experiment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from rlsprune.app.models.norm import slimming_norm

__all__ = ["FNN"]


class FNN(nn.Sequential):
    """Fully-connected layers ``fc1``, ``fc2``, … with ReLU between them, on flat features (prunable too).

    Args:
        sizes: Nodes per layer, from the inputs to the outputs.
        batch_norm: Whether a batch norm follows each hidden layer, as net slimming needs.

    Examples:
        >>> [name for name, _ in FNN().named_children()]
        ['fc1', 'relu1', 'fc2', 'relu2', 'fc3']
    """

    def __init__(self, sizes: Sequence[int] = (784, 1024, 512, 10), batch_norm: bool = False) -> None:
        if len(sizes) < 2:
            raise ValueError(f"sizes={tuple(sizes)} is not valid: give at least the inputs and the outputs")
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
            parts[f"fc{number}"] = nn.Linear(inputs, outputs)
            if number < len(sizes) - 1:
                if batch_norm:
                    parts[f"bn{number}"] = slimming_norm(nn.BatchNorm1d(outputs))
                parts[f"relu{number}"] = nn.ReLU()
        super().__init__(parts)
