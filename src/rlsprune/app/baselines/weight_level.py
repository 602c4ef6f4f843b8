"""One-shot pruning of single weights by magnitude, with masks that keep them at zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlsprune.app.baselines.common import OneShot
from rlsprune.app.baselines.zeroing import hold_at_zero, layer_weights, smallest, zero_out
from rlsprune.prune.event import PruneEvent

__all__ = ["WeightLevel"]


class WeightLevel(OneShot):
    """Sets the smallest weights of the whole network to zero and keeps them there.

    Han et al., *Learning both Weights and Connections for Efficient Neural Networks*, NIPS 2015: a network trained with
    L2 regularisation loses its connections below a threshold, and the others are trained further. Their threshold is a
    multiple of each layer's standard deviation. The paper's layers lose unequal shares and the network exactly 70 %
    (MNIST) or 50 % (CIFAR-10, SVHN): so there is one threshold over all weights, including the output layer's.

    The L2 regularisation is the weight decay of the run's optimizer. Our choices where they are silent: ⌊(1−ratio)·n⌋
    weights stay; the weights are set back to zero after each step of the optimizer, whose momentum is left as it is.

    Args:
        model: The network.
        example_inputs: A batch of its input; only its shape matters.
        ratio: The share of all weights that is set to zero.
        prune_epoch: The epoch, from 1, after which to prune; None for the unpruned twin.
    """

    def __init__(self, model: nn.Module, example_inputs: Tensor, *, ratio: float, prune_epoch: int | None) -> None:
        super().__init__(model, example_inputs, ratio, prune_epoch)
        self._weights = layer_weights(model)
        self._zeroed: dict[str, Tensor] = {}

    def after_step(self) -> None:
        """Sets the pruned weights back to zero."""
        hold_at_zero(self._weights, self._zeroed)

    def prune(self, epoch: int, loss: float) -> PruneEvent:
        """Chooses the weights to prune and sets them to zero."""
        self._zeroed = dict(zip(self._weights, smallest(list(self._weights.values()), self.ratio), strict=True))
        for copy in self.copies:
            hold_at_zero(layer_weights(copy), self._zeroed)
        return zero_out(self.model, self.example_inputs, self._zeroed, epoch, loss)

    def state_dict(self) -> dict[str, Any]:
        """Returns whether the network has been pruned, and the masks: True where a weight is held at zero."""
        return super().state_dict() | {"zeroed": dict(self._zeroed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that ``state_dict`` returned.

        Raises:
            ValueError: if the masks do not fit the network's weights.
        """
        super().load_state_dict(state)
        zeroed: dict[str, Tensor] = state["zeroed"]
        for name, mask in zeroed.items():
            found = tuple(self._weights[name].shape) if name in self._weights else "missing"
            if found != tuple(mask.shape):
                raise ValueError(f"the mask of {name!r} has shape {tuple(mask.shape)}; the network's weight is {found}")
        self._zeroed = {name: mask.to(self._weights[name].device) for name, mask in zeroed.items()}
