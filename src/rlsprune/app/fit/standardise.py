"""Columns of a table brought to one scale for training, and the scaling put into the weights that are delivered.

A layer that reads (x − μ) / σ with weight W and bias b computes what a layer computes that reads x with weight
W' = W / σ and bias b − W' μ. So the network is trained on scaled columns, and its file and ONNX graph take them as the
user has them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.model.calls import bare_copy
from rlsprune.model.modes import evaluating
from rlsprune.model.selector import kept_inputs

__all__ = ["Standardisation", "find_standardisation"]

_COMPARED = 64  # rows on which both forms of a network must agree


@dataclass(frozen=True, eq=False)
class Standardisation:
    """Means and deviations of the columns of a table, and the layers that read them."""

    mean: Tensor
    """μ, in float64."""
    scale: Tensor
    """σ, in float64; 1 for a constant column."""
    readers: tuple[str, ...]
    """The names of the layers that read the columns."""

    def scaled(self, data: Dataset) -> Dataset:
        """The same data with scaled columns."""
        valid = None if data.valid is None else self._scaled(data.valid)
        return replace(data, train=self._scaled(data.train), valid=valid, test=self._scaled(data.test))

    def for_unscaled(self, model: nn.Module) -> nn.Module:
        """A copy of a network of scaled columns that takes unscaled ones; it has no training hooks."""
        made = bare_copy(model)
        with torch.no_grad():
            for layer, mean, scale in self._readers(made):
                weight = layer.weight.double().cpu() / scale
                _write(layer, weight, -weight @ mean)
        return made

    @torch.no_grad()
    def take_out(self, model: nn.Module) -> None:
        """Makes a network of unscaled columns take scaled ones, in place; it computes what it did."""
        for layer, mean, scale in self._readers(model):
            weight = layer.weight.double().cpu()
            _write(layer, weight * scale, weight @ mean)

    def _scaled(self, split: Split) -> Split:
        values = (split.images.cpu().double() - self.mean) / self.scale
        return replace(split, images=values.to(split.images))

    def _readers(self, model: nn.Module) -> list[tuple[nn.Linear, Tensor, Tensor]]:
        """Each with the means and deviations of the columns that it has kept."""
        found = []
        for name in self.readers:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            kept = kept_inputs(layer)
            columns: Any = slice(None) if kept is None else kept.cpu()
            found.append((layer, self.mean[columns], self.scale[columns]))
        return found


def find_standardisation(model: nn.Module, data: Dataset) -> Standardisation | None:
    """How to scale the columns of a table for a network; None where it has no layer that could take the scaling over.

    Args:
        model: At full size. All that reads its input must be `nn.Linear` layers. Where one has no bias, columns are
            divided by their root mean square and not centred.
        data: Floating-point rows (N, columns); of anything else nothing is scaled.
    """
    rows = data.train.images
    if not rows.is_floating_point() or rows.ndim != 2:
        return None
    readers = _readers_of(model, rows[:2])
    if not readers or not all(isinstance(layer, nn.Linear) for layer in readers.values()):
        return None
    values = rows.cpu().double()
    centred = all(layer.bias is not None for layer in readers.values())
    mean = values.mean(0) if centred else torch.zeros_like(values[0])
    scale = (values - mean).square().mean(0).sqrt()
    scale = torch.where(scale > 1e-7 * values.abs().amax(0), scale, 1.0)
    found = Standardisation(mean, scale, tuple(readers))
    return found if _agrees(found, model, rows[:_COMPARED]) else None


def _readers_of(model: nn.Module, rows: Tensor) -> dict[str, nn.Module]:
    """The innermost modules that are called with the network's input itself."""
    readers: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.data_ptr() == inputs.data_ptr() and given.shape[-1] == inputs.shape[-1]:
            readers[name] = module

    inputs = rows.clone()
    inner = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: look(name, module, args))
        for name, module in inner
        if not isinstance(module, nn.Identity | nn.Flatten | nn.Dropout)
    ]
    try:
        with evaluating(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return readers


def _agrees(found: Standardisation, model: nn.Module, rows: Tensor) -> bool:
    """Whether scaled columns and the scaling taken out give the same outputs: something else may read the input too."""
    scaled = copy.deepcopy(model)
    found.take_out(scaled)
    with evaluating(model, scaled):
        wanted = model(rows)
        got = scaled(found._scaled(Split(rows, rows[:, 0])).images)
    return torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def _write(layer: nn.Linear, weight: Tensor, shift: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.double().cpu() + shift)
