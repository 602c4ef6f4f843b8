"""Scaling of a table's columns for training, which then moves into the weights of the delivered model.

The network trains on scaled columns; its file and ONNX graph take the columns as the user has them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset
from rlsprune.model.calls import bare_copy
from rlsprune.model.modes import evaluating
from rlsprune.model.scaling import Scaling

__all__ = ["Standardisation", "find_standardisation"]

_COMPARED = 64  # rows on which both forms of a network must agree


@dataclass(frozen=True, eq=False)
class Standardisation:
    """The scaling of a table's columns, and the layers that read them."""

    scaling: Scaling
    readers: tuple[str, ...]
    """The names of the layers."""

    def scaled(self, data: Dataset) -> Dataset:
        """Returns the same data with scaled columns."""
        return data.each(lambda split: replace(split, images=self.scaling.scaled(split.images)))

    def for_unscaled(self, model: nn.Module) -> nn.Module:
        """Copies a network of scaled columns into one of unscaled columns, without training hooks."""
        made = bare_copy(model)
        for layer in self._readers(made):
            self.scaling.add_to_reader(layer)
        return made

    def take_out(self, model: nn.Module) -> None:
        """Makes a network of unscaled columns take scaled ones, in place; its outputs stay the same."""
        for layer in self._readers(model):
            self.scaling.take_from_reader(layer)

    def _readers(self, model: nn.Module) -> list[nn.Linear]:
        return [layer for name in self.readers if isinstance(layer := model.get_submodule(name), nn.Linear)]


def find_standardisation(model: nn.Module, data: Dataset) -> Standardisation | None:
    """Finds how to scale the columns of a table for a network; None where no layer can take the scaling over.

    Args:
        model: The network at full size. Only `nn.Linear` layers may read its input. If one of them has no bias, columns
            are divided by their root mean square and not centred.
        data: Floating-point rows (N, columns); other data are not scaled.
    """
    rows = data.train.images
    if not rows.is_floating_point() or rows.ndim != 2:
        return None
    readers = _readers_of(model, rows[:2])
    if not readers or not all(isinstance(layer, nn.Linear) for layer in readers.values()):
        return None
    centred = all(layer.bias is not None for layer in readers.values())
    found = Standardisation(Scaling.of(rows, centred=centred), tuple(readers))
    return found if _agrees(found, model, rows[:_COMPARED]) else None


def _readers_of(model: nn.Module, rows: Tensor) -> dict[str, nn.Module]:
    """Finds the innermost modules that are called with the network's input itself."""
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
    """Returns whether the adapted network gives the same outputs on scaled rows; something else may read the input."""
    scaled = copy.deepcopy(model)
    found.take_out(scaled)
    with evaluating(model, scaled):
        wanted = model(rows)
        got = scaled(found.scaling.scaled(rows))
    return torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
