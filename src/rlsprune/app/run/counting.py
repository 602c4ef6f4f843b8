"""What is left of every layer: channels, and nodes and weights as the paper counts them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlsprune.app.run.method import Retained
from rlsprune.model.selector import kept_inputs

__all__ = ["INPUT", "count_retained", "percent", "total"]

INPUT = "input"
"""The name of the row that counts the network's own inputs."""


@torch.no_grad()
def count_retained(model: nn.Module, example_inputs: Tensor, zeros: bool = True) -> dict[str, Retained]:
    """Nodes, weights and channels of every Linear and Conv2d layer, in the order of the forward pass.

    Args:
        model: Any network; it is run once, in evaluation mode.
        example_inputs: A batch; only its shape matters.
        zeros: Whether weights that are exactly zero count.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    read = _inputs_read(layers, example_inputs)
    counts = {INPUT: Retained(read, 0, read)}

    def count(name: str, layer: nn.Linear | nn.Conv2d, output: Tensor) -> None:
        if len(counts) == 1 and isinstance(layer, nn.Conv2d):
            counts[INPUT] = Retained(read, 0, layer.in_channels)
        weights = layer.weight.numel() if zeros else int(torch.count_nonzero(layer.weight))
        channels = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
        counts[name] = Retained(output[0].numel(), weights, channels)

    handles = [
        layer.register_forward_hook(lambda layer, _, output, name=name: count(name, layer, output))
        for name, layer in layers.items()
    ]
    was_training = model.training
    try:
        model.eval()(example_inputs[:1])
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return counts


def total(counts: Mapping[str, Retained]) -> Retained:
    """All of the network, inputs among them."""
    return Retained(*map(sum, zip(*counts.values(), strict=True)))


def percent(part: float, whole: float) -> float:
    """A share of the unpruned network, 0 to 100."""
    return 100 * part / whole if whole else 0.0


def _inputs_read(layers: Mapping[str, nn.Linear | nn.Conv2d], example_inputs: Tensor) -> int:
    kept = [indices for layer in layers.values() if (indices := kept_inputs(layer)) is not None]
    return sum(len(indices) for indices in kept) or example_inputs[0].numel()
