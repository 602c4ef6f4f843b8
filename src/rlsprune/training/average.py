"""A moving average of a network's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.model.calls import bare_copy

__all__ = ["MovingAverage"]


class MovingAverage:
    """A copy of a network whose weights are the mean of the recent ones, and so are its batch norms' statistics.

    As torch's ``AveragedModel``, but no step makes the host wait for an accelerator, buffers other than statistics are
    copied, and early in a run it reaches back a third of the way at most, so that it soon leaves the initial weights
    behind.

    Args:
        model: The network.
        steps: How far back it reaches: a step counts 1/e as much after so many more.
    """

    def __init__(self, model: nn.Module, steps: float) -> None:
        self.network = bare_copy(model)
        self._steps = max(1.0, steps)
        self._taken = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Adds the network's present weights to the average. Network and copy have the same shape."""
        share = max(1 / self._steps, 3 / (3 + self._taken))
        torch._foreach_lerp_(_averaged(self.network), _averaged(model), share)
        for mine, current in zip(_copied(self.network), _copied(model), strict=True):
            mine.copy_(current)
        self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""
        return {"network": self.network.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state. The copy already has its shape."""
        self.network.load_state_dict(state["network"])
        self._taken = int(state["taken"])


def _averaged(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *_statistics(model)]


def _copied(model: nn.Module) -> list[Tensor]:
    """Indices, counts, masks with infinities in them and whatever else a network keeps."""
    averaged = {id(tensor) for tensor in _statistics(model)}
    return [buffer for buffer in model.buffers() if id(buffer) not in averaged]


def _statistics(model: nn.Module) -> list[Tensor]:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
