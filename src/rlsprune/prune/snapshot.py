"""All or nothing: what a network and its optimizer were, to be put back exactly."""

from __future__ import annotations

import copy as copying
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.graph.layers import axis_of, sides
from rlsprune.prune.surgery import replace_data


class Snapshot:
    """The parameters, buffers, layer attributes and flags of a network and the state of its optimizer.

    Surgery never writes to old tensors, so undoing an event that failed half-way needs references only. What is
    written to in place since (by training, or by ``weight.copy_``) comes back only from a snapshot with copies.

    Args:
        model: The network.
        optimizer: Whose per-parameter state is kept too; its settings (learning rates, …) are not.
        copy: Copy every tensor, for rolling back after further training. Gradients are not kept then.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, copy: bool = False) -> None:
        self._copy = copy
        self._optimizer = optimizer
        modules = list(model.modules())
        self._parameters = [
            (parameter, self._keep(parameter.data), parameter.requires_grad, None if copy else parameter.grad)
            for parameter in model.parameters()
        ]
        self._buffers = [
            (module, name, buffer, None if buffer is None else self._keep(buffer.data))
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        self._attributes = [
            (module, name, getattr(module, name))
            for module in modules
            for side in sides(module)
            for name in axis_of(module, side).attributes
        ]
        state = {} if optimizer is None else optimizer.state
        self._state = {parameter: self._keep(entries) for parameter, entries in state.items()}

    def restore(self) -> None:
        """Put everything back, in the same Parameter objects; a snapshot can be restored any number of times.

        Buffers registered and hooks added since are left alone.
        """
        for parameter, data, requires_grad, grad in self._parameters:
            replace_data(parameter, self._keep(data))
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
        for module, name, buffer, data in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and data is not None:
                replace_data(buffer, self._keep(data))
        for module, name, value in self._attributes:
            setattr(module, name, value)
        if self._optimizer is not None:
            for key in [known for known in self._optimizer.state if known not in self._state]:
                del self._optimizer.state[key]
            for key, entries in self._state.items():
                own = self._optimizer.state[key]
                own.clear()
                own.update(self._keep(entries))

    def _keep(self, value: Any) -> Any:
        """The value with containers of its own; tensors and all else copied or referred to, as was asked."""
        if isinstance(value, Tensor):
            return value.detach().clone() if self._copy else value
        if type(value) in (list, tuple):
            return type(value)(self._keep(item) for item in value)
        if type(value) is dict:
            return {key: self._keep(item) for key, item in value.items()}
        return copying.deepcopy(value) if self._copy else value
