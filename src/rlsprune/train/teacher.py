"""A network that another one learns from, beside the labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlsprune._arguments import check_argument
from rlsprune._model import bare_copy

__all__ = ["Teacher"]


class Teacher:
    """Remembers a network as it is now, whose outputs are worth imitating.

    Args:
        network: Copied.
        share: How much of the loss is the distance from its outputs, in [0, 1]; the rest is that from the labels.
    """

    def __init__(self, network: nn.Module, share: float) -> None:
        check_argument("distill", share, 0 <= share <= 1, "in [0, 1]")
        self._network = bare_copy(network).eval().requires_grad_(False)
        self._share = share

    def mix(self, loss: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The loss of a batch, with the teacher's part in it.

        That is half the squared distance from its outputs, as a share of their own square: outputs near 0 and 1, as Eq.
        (15) makes them, and the larger ones of cross-entropy weigh alike then.
        """
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise TypeError(f"the network gives a {kind}, and only a tensor can be imitated: leave distill at 0")
        with torch.no_grad():
            targets = self._network(inputs)
        distance = (outputs - targets).square().sum() / (2 * targets.square().sum())
        return torch.lerp(loss, distance, self._share)
