"""How the paper counts: nodes and weights per layer, and both as percentages of the unpruned network."""

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
    """Nodes and weights of every Linear and Conv2d layer, in the order of the forward pass.

    Args:
        model: Any network; it is run once, in evaluation mode.
        example_inputs: A batch; only its shape matters.
        zeros: Whether weights that are exactly zero count.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    counts = {INPUT: Retained(_inputs_read(layers, example_inputs), 0)}

    def count(name: str, layer: nn.Linear | nn.Conv2d, output: Tensor) -> None:
        weights = layer.weight.numel() if zeros else int(torch.count_nonzero(layer.weight))
        counts[name] = Retained(output[0].numel(), weights)

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
    """All nodes, inputs among them, and all weights."""
    return Retained(sum(count.nodes for count in counts.values()), sum(count.weights for count in counts.values()))


def percent(part: float, whole: float) -> float:
    """A share of the unpruned network, 0 to 100."""
    return 100 * part / whole if whole else 0.0


def _inputs_read(layers: Mapping[str, nn.Linear | nn.Conv2d], example_inputs: Tensor) -> int:
    kept = [indices for layer in layers.values() if (indices := kept_inputs(layer)) is not None]
    return sum(len(indices) for indices in kept) or example_inputs[0].numel()
