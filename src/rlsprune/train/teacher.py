"""A network that another one learns from, beside the labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlsprune._model import bare_copy

__all__ = ["Teacher"]


class Teacher:
    """Remembers a network as it is now, whose outputs are worth imitating.

    Args:
        network: Copied.
        share: How much of the loss is the distance from its outputs, in [0, 1]; the rest is that from the labels.
        example: An input.

    Raises:
        TypeError: Its output is not one tensor.
    """

    def __init__(self, network: nn.Module, share: float, example: Tensor) -> None:
        self._network = bare_copy(network).eval().requires_grad_(False)
        self._share = share
        if not isinstance(outputs := self._network(example), Tensor):
            raise TypeError(
                f"the network gives a {type(outputs).__name__}, and only a tensor can be imitated: give distill=0"
            )

    def mix(self, loss: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The loss of a batch, with the teacher's part in it.

        That is half the squared distance from its outputs, as a share of their own square: outputs near 0 and 1, as Eq.
        (15) makes them, and the larger ones of cross-entropy weigh alike then.
        """
        precision = torch.promote_types(outputs.dtype, torch.float32)  # the squares of a batch are too much for half
        with torch.no_grad():
            targets = self._network(inputs).to(precision)
        whole = targets.square().sum().clamp_min(torch.finfo(precision).tiny)
        distance: Tensor = (outputs.to(precision) - targets).square().sum() / (2 * whole)
        return (1 - self._share) * loss + self._share * distance
