"""Targets of a regression brought to one scale for training, and the scaling put into the last layer that is delivered.

A network that is to say y learns (y − μ) / σ. Its last layer with weight W and bias b then becomes one with weight σW
and bias σb + μ, so that its file and ONNX graph give y as the user has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.model.calls import bare_copy
from rlsprune.model.modes import evaluating

__all__ = ["TargetScale", "find_target_scale"]

_COMPARED = 64  # inputs on which both forms of a network must agree


@dataclass(frozen=True, eq=False)
class TargetScale:
    """Means and deviations of the targets, and the layer that says them."""

    mean: Tensor
    """μ, in float64."""
    scale: Tensor
    """σ, in float64; 1 for a constant target."""
    last: str
    """The name of the layer."""

    def scaled(self, data: Dataset) -> Dataset:
        """The same data with scaled targets."""
        valid = None if data.valid is None else self._scaled(data.valid)
        return replace(data, train=self._scaled(data.train), valid=valid, test=self._scaled(data.test))

    def in_users_unit(self, values: Tensor) -> Tensor:
        """Scaled targets, or what the network says of them, as the user has them."""
        return values.cpu().double() * self.scale + self.mean

    def for_unscaled(self, model: nn.Module) -> nn.Module:
        """A copy of a network that says scaled targets which says unscaled ones; it has no training hooks."""
        made = bare_copy(model)
        self._write(made, self.scale, self.mean)
        return made

    def take_out(self, model: nn.Module) -> None:
        """Makes a network that says unscaled targets say scaled ones, in place."""
        self._write(model, 1 / self.scale, -self.mean / self.scale)

    @torch.no_grad()
    def _write(self, model: nn.Module, scale: Tensor, shift: Tensor) -> None:
        layer = model.get_submodule(self.last)
        assert isinstance(layer, nn.Linear)
        layer.weight.copy_(layer.weight.double().cpu() * scale[:, None])
        layer.bias.copy_(layer.bias.double().cpu() * scale + shift)

    def _scaled(self, split: Split) -> Split:
        return replace(split, labels=((split.labels.cpu().double() - self.mean) / self.scale).to(split.labels))


def find_target_scale(model: nn.Module, data: Dataset) -> TargetScale | None:
    """How to scale the targets for a network; None unless its outputs are those of a `nn.Linear` layer with a bias."""
    if data.task != "regression":
        return None
    last = _last_layer(model, data)
    if last is None or not _is_said_by(last, model, data):
        return None
    values = data.train.labels.cpu().double()
    mean = values.mean(0)
    scale = (values - mean).square().mean(0).sqrt()
    return TargetScale(mean, torch.where(scale > 1e-7 * values.abs().amax(0), scale, 1.0), last)


def _is_said_by(last: str, model: nn.Module, data: Dataset) -> bool:
    """Whether a layer's scaling is that of the outputs: an operation in place may follow it, such as a ReLU."""
    some = torch.rand(_COMPARED, *data.shape, generator=torch.Generator().manual_seed(0))
    inputs = some.to(data.train.images.device)
    layer = model.get_submodule(last)
    assert isinstance(layer, nn.Linear)
    away = torch.full((layer.out_features,), -10.0, dtype=torch.float64)  # turned round: what clips or bends shows
    other = TargetScale(away, away, last).for_unscaled(model)
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
    """The layer whose output is that of the network, but for its shape, and nothing else's."""
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
    layer = model.get_submodule(names[0])
    assert isinstance(layer, nn.Linear)
    return names[0] if layer.bias is not None else None
