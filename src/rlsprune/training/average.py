"""A moving average of a network's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.model.calls import bare_copy

__all__ = ["MovingAverage"]


class MovingAverage:
    """A copy of a network with a moving average of its weights and of its batch norms' statistics.

    It differs from torch's ``AveragedModel``: no step makes the host wait for an accelerator, and buffers other than
    statistics are copied. Early in a run it averages over at most a third of the steps so far, so that it soon forgets
    the initial weights.

    Args:
        model: The network.
        steps: Time constant: the weight of a step falls to 1/e after so many more.
    """

    def __init__(self, model: nn.Module, steps: float) -> None:
        self.network = bare_copy(model)
        self._steps = max(1.0, steps)
        self._taken = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Adds the network's present weights to the average. Network and copy must have the same shape."""
        share = max(1 / self._steps, 3 / (3 + self._taken))
        torch._foreach_lerp_(_averaged(self.network), _averaged(model), share)
        for mine, current in zip(_copied(self.network), _copied(model), strict=True):
            mine.copy_(current)
        self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain containers and tensors."""
        return {"network": self.network.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state. The copy must already have its shape."""
        self.network.load_state_dict(state["network"])
        self._taken = int(state["taken"])


def _averaged(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *_statistics(model)]


def _copied(model: nn.Module) -> list[Tensor]:
    """Returns the buffers that are not averaged: indices, counts, masks with infinities and all others."""
    averaged = {id(tensor) for tensor in _statistics(model)}
    return [buffer for buffer in model.buffers() if id(buffer) not in averaged]


def _statistics(model: nn.Module) -> list[Tensor]:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
