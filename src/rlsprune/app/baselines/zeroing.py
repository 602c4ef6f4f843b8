"""Zeroing of single weights: their choice, and the event that counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.prune import L1Unstructured

from rlsprune.app.baselines.common import stays
from rlsprune.graph.layers import join
from rlsprune.model.counts import count
from rlsprune.prune.event import PruneEvent


def layer_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of all linear and convolution layers by name, each tensor once, without biases and norms.

    Raises:
        ValueError: if a layer's weight is not a plain parameter, or there is no such layer.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | _ConvNd):
            weight = module._parameters.get("weight")
            if weight is None:
                raise ValueError(
                    f"the weight of {name!r} is parametrised or masked, not a plain parameter: remove that first"
                )
            if all(weight is not other for other in found.values()):
                found[join(name, "weight")] = weight
    if not found:
        raise ValueError("the network has no linear or convolution layer, so no weights to prune")
    return found


def smallest(weights: Sequence[Tensor], ratio: float) -> list[Tensor]:
    """Returns masks that are True for the smallest of all given weights by magnitude; ⌊(1−ratio)·n⌋ weights stay."""
    shapes = [weight.shape for weight in weights]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    # Not prune.global_unstructured, which would replace the parameter by a computed tensor: optimizer, counting and
    # saving must see plain weights.
    chooser: Any = L1Unstructured(amount=len(flat) - stays(len(flat), ratio))
    kept: Tensor = chooser.compute_mask(flat, torch.ones_like(flat, dtype=torch.bool))
    parts = torch.split(~kept, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def ratio_at(model: nn.Module, target: float) -> float:
    """Computes the share of the weights to set to zero so that this share of all parameters is left.

    Raises:
        ValueError: Biases and norms alone are already more than that.
    """
    params = sum(parameter.numel() for parameter in model.parameters())
    weights = sum(weight.numel() for weight in layer_weights(model).values())
    left = target * params - (params - weights)
    if left < 1:
        raise ValueError(
            f"target={target} cannot be reached: biases and norms are {params - weights} parameters. Raise it"
        )
    return 1 - left / weights


def zero_out(
    model: nn.Module, example_inputs: Tensor, zeroed: Mapping[str, Tensor], epoch: int, loss: float
) -> PruneEvent:
    """Sets weights to zero where the masks, by the names of ``layer_weights``, are True.

    The event counts parameters that are not zero; no unit is removed, and a dense network costs the same FLOPs.
    """
    weights = layer_weights(model)
    params, flops = count(model, example_inputs)
    before = sum(int((weight == 0).sum()) for weight in weights.values())
    hold_at_zero(weights, zeroed)
    after = sum(int((weight == 0).sum()) for weight in weights.values())
    return PruneEvent(
        epoch=epoch,
        loss=loss,
        params_before=params - before,
        params_after=params - after,
        flops_before=flops,
        flops_after=flops,
        layers=(),
    )


@torch.no_grad()
def hold_at_zero(weights: Mapping[str, nn.Parameter], zeroed: Mapping[str, Tensor]) -> None:
    """Sets weights to zero where the masks of the same names are True."""
    for name, mask in zeroed.items():
        weights[name].masked_fill_(mask, 0)
