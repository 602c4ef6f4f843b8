"""Snapshots of a network and its optimizer, which can be restored exactly."""

from __future__ import annotations

import copy as copying
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.model.selector import KEPT_INPUTS, full_in_features, kept_inputs, set_kept_inputs
from rlsprune.model.sharded import settle
from rlsprune.model.sizes import read_sizes, write_sizes
from rlsprune.model.tensors import replace_data
from rlsprune.optim.entries import upgraded


class Snapshot:
    """The parameters, buffers, layer attributes and input selectors of a network, and its optimizer's state.

    Surgery never writes to old tensors, so undoing an event that failed half-way needs references only. Tensors that
    are written to in place afterwards (by training, or by ``weight.copy_``) can only be restored from copies.

    Args:
        model: The network.
        optimizer: The optimizer whose per-parameter state is kept, too; its settings (learning rates, …) are not.
        copy: Whether to copy every tensor, for rolling back after further training. Gradients are not kept then.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, copy: bool = False) -> None:
        self._copy, self._model, self._optimizer = copy, model, optimizer
        settle(model)
        parameters = dict(model.named_parameters())
        self._data = {name: self._keep(parameter.data) for name, parameter in parameters.items()}
        self._grads = {name: None if copy else parameter.grad for name, parameter in parameters.items()}
        self._buffers: dict[str, dict[str, tuple[Tensor | None, Tensor | None]]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._selectors: dict[str, tuple[Tensor, int] | None] = {}
        for name, module in model.named_modules():
            self._buffers[name] = {
                own: (buffer, None if buffer is None else self._keep(buffer.data))
                for own, buffer in module._buffers.items()
                if own != KEPT_INPUTS
            }
            self._attributes[name] = dict(read_sizes(module) or {})
            if isinstance(module, nn.Linear):
                kept = kept_inputs(module)
                self._selectors[name] = None if kept is None else (self._keep(kept), full_in_features(module))
        state = {} if optimizer is None else optimizer.state
        self._state = {parameter: self._keep(entries) for parameter, entries in state.items()}

    def restore(self) -> None:
        """Restores everything, in the same Parameter objects. A snapshot can be restored any number of times.

        It leaves alone buffers registered, hooks added and parameters frozen since, except for input selectors.
        """
        settle(self._model)
        parameters = dict(self._model.named_parameters())
        for name, data in self._data.items():
            replace_data(parameters[name], self._keep(data).to(parameters[name].device))
            parameters[name].grad = self._grads[name]
        settle(self._model)
        for name, module in self._model.named_modules():
            for own, (buffer, data) in self._buffers[name].items():
                module._buffers[own] = buffer
                if buffer is not None and data is not None:
                    replace_data(buffer, self._keep(data).to(buffer.device))
            write_sizes(module, self._attributes[name])
            if isinstance(module, nn.Linear):
                kept, width = self._selectors[name] or (None, None)
                set_kept_inputs(module, kept, width)
        if self._optimizer is not None:
            for key in [known for known in self._optimizer.state if known not in self._state]:
                del self._optimizer.state[key]
            for key, entries in self._state.items():
                own_entries = self._optimizer.state[key]
                own_entries.clear()
                own_entries.update(self._keep(entries))

    def state_dict(self) -> dict[str, Any]:
        """Returns the snapshot as plain containers, by name, for a checkpoint."""
        return {
            "data": self._data,
            "buffers": {
                name: {own: data for own, (_, data) in buffers.items()} for name, buffers in self._buffers.items()
            },
            "attributes": self._attributes,
            "selectors": self._selectors,
            "state": [self._state.get(parameter) for parameter in self._order()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Turns this snapshot into a saved one of the same network, perhaps in another shape.

        Raises:
            ValueError: The saved snapshot is of another network.
        """
        if state["data"].keys() != self._data.keys() or state["attributes"].keys() != self._attributes.keys():
            raise ValueError("the snapshot is of a network with other layers: build the same model before loading it")
        self._data = {name: self._keep(data) for name, data in state["data"].items()}
        for name, buffers in state["buffers"].items():
            self._buffers[name] = {
                own: (self._buffers[name][own][0], self._keep(data)) for own, data in buffers.items()
            }
        self._attributes = {name: dict(values) for name, values in state["attributes"].items()}
        self._selectors = {name: None if kept is None else tuple(kept) for name, kept in state["selectors"].items()}
        if self._optimizer is not None:
            pairs = zip(self._order(), state["state"], strict=True)
            self._state = {p: _on_device(upgraded(entries), p.device) for p, entries in pairs if entries is not None}

    def _order(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _keep(self, value: Any) -> Any:
        """Returns the value in new containers. Copies or references tensors and all else, as the snapshot was told."""
        if isinstance(value, Tensor):
            return value.detach().clone() if self._copy else value
        if type(value) in (list, tuple):
            return type(value)(self._keep(item) for item in value)
        if type(value) is dict:
            return {key: self._keep(item) for key, item in value.items()}
        return copying.deepcopy(value) if self._copy else value


def _on_device(value: Any, device: torch.device) -> Any:
    """Returns a copy with tensors on the device. Step counts stay on their device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True) if value.dim() else value.clone()
    if isinstance(value, list):
        return [_on_device(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    return value
