"""Zeroing of the smallest weights after every epoch; they may come back."""

from __future__ import annotations

from torch import Tensor, nn

from rlsprune.app.baselines.common import Rival
from rlsprune.app.baselines.zeroing import hold_at_zero, layer_weights, smallest, zero_out
from rlsprune.prune.event import PruneEvent

__all__ = ["SoftPruning"]


class SoftPruning(Rival):
    """Sets the smallest weights of every layer to zero at the end of every epoch; training may change them again.

    He et al., *Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks*, IJCAI 2018: after every epoch
    the filters with the smallest L2 norm are set to zero but trained on, so that they can recover, and are removed
    after the last epoch. The paper compares with a variant that "zeroes out the smallest 30 % absolute values of
    weights at each epoch", removes none, and keeps 70.0 % of the weights of every layer, including the output layer.
    This is that variant.

    Our choices where it is silent: it begins with the first epoch; ⌊(1−ratio)·n⌋ weights of a layer stay; the
    optimizer's momentum is left as it is; the network is counted and evaluated after zeroing.

    Args:
        model: The network.
        example_inputs: A batch of its input; only its shape matters.
        ratio: The share of each layer's weights that is set to zero.
    """

    def __init__(self, model: nn.Module, example_inputs: Tensor, *, ratio: float = 0.3) -> None:
        super().__init__(model, example_inputs, ratio)
        layer_weights(model)

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent:
        """Sets the smallest weights of every layer to zero."""
        for copy in self.copies:
            hold_at_zero(layer_weights(copy), self._smallest(copy))
        return zero_out(self.model, self.example_inputs, self._smallest(self.model), epoch, loss)

    def _smallest(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: smallest([weight], self.ratio)[0] for name, weight in layer_weights(model).items()}
