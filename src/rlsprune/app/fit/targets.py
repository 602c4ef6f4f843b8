"""Scaling of a regression's targets for training, which then moves into the last layer of the delivered model.

The network learns (y − μ) / σ; its file and ONNX graph return y as the user has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset
from rlsprune.model.calls import bare_copy
from rlsprune.model.modes import evaluating
from rlsprune.model.scaling import Scaling

__all__ = ["TargetScale", "find_target_scale"]

_COMPARED = 64  # inputs on which both forms of a network must agree


@dataclass(frozen=True, eq=False)
class TargetScale:
    """The scaling of the targets, and the layer that computes them."""

    scaling: Scaling
    last: str
    """The name of the layer."""

    def scaled(self, data: Dataset) -> Dataset:
        """Returns the same data with scaled targets."""
        return data.each(lambda split: replace(split, labels=self.scaling.scaled(split.labels)))

    def for_unscaled(self, model: nn.Module) -> nn.Module:
        """Copies a network of scaled targets into one of unscaled targets, without training hooks."""
        made = bare_copy(model)
        self.scaling.add_to_writer(_linear(made, self.last))
        return made

    def take_out(self, model: nn.Module) -> None:
        """Makes a network of unscaled targets return scaled ones, in place."""
        self.scaling.take_from_writer(_linear(model, self.last))


def find_target_scale(model: nn.Module, data: Dataset) -> TargetScale | None:
    """Finds how to scale the targets; None unless the outputs are those of a `nn.Linear` layer with a bias."""
    if data.task != "regression":
        return None
    last = _last_layer(model, data)
    if last is None or not _is_said_by(last, model, data):
        return None
    return TargetScale(Scaling.of(data.train.labels), last)


def _is_said_by(last: str, model: nn.Module, data: Dataset) -> bool:
    """Returns whether scaling the layer scales the outputs; an in-place operation such as a ReLU may follow it."""
    some = torch.rand(_COMPARED, *data.shape, generator=torch.Generator().manual_seed(0))
    inputs = some.to(data.train.images.device)
    away = torch.full((_linear(model, last).out_features,), -10.0, dtype=torch.float64)  # a sign change shows clipping
    other = TargetScale(Scaling(away, away), last).for_unscaled(model)
    with evaluating(model, other):
        wanted, got = -10 * _outputs(model, inputs) - 10, _outputs(other, inputs)
    return torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    try:
        outputs: Tensor = model(inputs)
    except Exception:  # a network that takes its inputs flat
        outputs = model(inputs.flatten(1))
    return outputs


def _last_layer(model: nn.Module, data: Dataset) -> str | None:
    """Finds the one layer, called once, whose output is the network's up to its shape."""
    seen: list[tuple[str, Tensor]] = []

    def look(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            seen.append((name, output))

    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    inputs = torch.zeros(2, *data.shape, device=data.train.images.device)
    try:
        with evaluating(model):
            outputs = _outputs(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    names = [
        name for name, output in seen if output.data_ptr() == outputs.data_ptr() and output.numel() == outputs.numel()
    ]
    calls = [name for name, _ in seen]
    if len(names) != 1 or calls.count(names[0]) != 1:
        return None
    return names[0] if _linear(model, names[0]).bias is not None else None


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
