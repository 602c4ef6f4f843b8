"""Counts of every layer: channels, and nodes and weights as the paper counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rlsprune.app.run.method import Retained
from rlsprune.model.counts import weight_names
from rlsprune.model.modes import evaluating
from rlsprune.model.selector import kept_inputs

__all__ = ["INPUT", "count_retained", "percent", "total"]

INPUT = "input"
"""The name of the row that counts the network's own inputs."""


def count_retained(model: nn.Module, example_inputs: Tensor, zeros: bool = True) -> dict[str, Retained]:
    """Counts the nodes, weights and channels of every layer with weights, in the order of the forward pass.

    Args:
        model: Any network; it runs once, in evaluation mode.
        example_inputs: A batch; only its shape matters.
        zeros: Whether weights that are exactly zero count.
    """
    layers = {name: layer for name, layer in model.named_modules() if weight_names(layer)}
    read = _inputs_read(layers, example_inputs)
    counts = {INPUT: Retained(read, 0, read)}

    def count(name: str, layer: nn.Module, output: Any) -> None:
        if len(counts) == 1 and isinstance(layer, _ConvNd):
            counts[INPUT] = Retained(read, 0, layer.in_channels)
        own = [getattr(layer, weight) for weight in weight_names(layer)]
        weights = sum(_count(weight, zeros) for weight in own if weight is not None)
        result = output if isinstance(output, Tensor) else output[0]  # a recurrent layer also returns its last state
        counts[name] = Retained(result[0].numel(), weights, _channels(layer))

    handles = [
        layer.register_forward_hook(lambda layer, _, output, name=name: count(name, layer, output))
        for name, layer in layers.items()
    ]
    try:
        with evaluating(model):
            model(example_inputs[:1])
    finally:
        for handle in handles:
            handle.remove()
    return counts


def _count(weight: Tensor, zeros: bool) -> int:
    return weight.numel() if zeros else int(torch.count_nonzero(weight))


def _channels(layer: nn.Module) -> int:
    names = ("out_channels", "out_features", "hidden_size", "embedding_dim", "embed_dim")
    return next(int(getattr(layer, name)) for name in names if hasattr(layer, name))


def total(counts: Mapping[str, Retained]) -> Retained:
    """Sums the counts of the whole network, including its inputs."""
    return Retained(*map(sum, zip(*counts.values(), strict=True)))


def percent(part: float, whole: float) -> float:
    """Computes a share of the unpruned network, 0 to 100."""
    return 100 * part / whole if whole else 0.0


def _inputs_read(layers: Mapping[str, nn.Module], example_inputs: Tensor) -> int:
    kept = [indices for layer in layers.values() if (indices := kept_inputs(layer)) is not None]
    return sum(len(indices) for indices in kept) or example_inputs[0].numel()
