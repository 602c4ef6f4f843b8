"""The interface between a training run and a pruning method, the same for ours and its rivals.

One epoch of a run is::

    for every batch:   forward, loss, zero_grad, backward
                       method.after_backward()     # penalties on gradients, gradient masks
                       optimizer.step()
                       method.after_step()         # masks put on again
    accuracy before  (test set, network as it is)
    event = method.end_epoch(epoch, loss)          # may prune
    after the last epoch: event = method.finish()
    accuracy after   (only if there was an event)
    counts            = method.retained()

The run builds the model and the optimizer. A method gets both, changes the model in place, and cuts the optimizer's
state with it (``rlsprune.prune.surgery.apply_cuts``). The optimizer and all ``Parameter`` objects keep their identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import nn

from rlsprune.prune.event import PruneEvent

__all__ = ["Method", "Retained"]


class Retained(NamedTuple):
    """The counts of one layer after pruning."""

    nodes: int
    """Output features, or output channels times the size of their map; for ``"input"`` the inputs that are read."""
    weights: int
    """Weights without biases that are not zeroed out by the method; 0 for ``"input"``."""
    channels: int
    """Output features, or output channels of a convolution; for ``"input"`` the channels that are read."""


class Method(Protocol):
    """The interface of a pruning method to a run.

    Epochs count from 1. A method that prunes once takes ``prune_epoch`` and does it in ``end_epoch(prune_epoch, …)``.
    """

    @property
    def settled(self) -> bool:
        """Returns whether nothing depends on the gate's loss any more, so that held-out images may be trained on."""

    @property
    def ended(self) -> bool:
        """Returns whether there will be no more prunes."""

    def follow(self, copy: nn.Module) -> None:
        """Prunes a copy of the network, such as a moving average, with the network from now on."""

    def weigh_by(self, held_out_loss: Callable[[], float]) -> None:
        """Gives the method a held-out loss with which it may measure the cost of cutting a layer."""

    def after_backward(self) -> None:
        """Acts after the backward pass and before the optimizer's step."""

    def after_step(self) -> None:
        """Acts after the optimizer's step."""

    def spent(self, share: float) -> None:
        """Gets the used share of the run's time, before each ``end_epoch`` of a run with limited time."""

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Ends an epoch, and may prune.

        Args:
            epoch: The number of epochs trained, from 1.
            loss: The loss of the run's gate.

        Returns:
            An event if the weights or the shape of the network changed here in any way (zeroing weights counts), so
            that the run evaluates again; else None.
        """

    def finish(self) -> PruneEvent | None:
        """Leaves the final network after the last epoch. The run calls it once, after ``end_epoch``."""

    def gate_level(self) -> float | None:
        """Returns the level below which the loss must fall before the next prune; None if the method does not wait."""

    def missed_target(self) -> float | None:
        """Returns the target that the method has missed, as a share of the network; None if it has missed none."""

    def retained(self) -> Mapping[str, Retained]:
        """Counts what is left of each layer, ``"input"`` first; weights that the method holds at zero do not count.

        ``rlsprune.app.run.counting.count_retained(model, example_inputs)`` counts the network as it stands,
        ``count_retained(model, example_inputs, zeros=False)`` only weights that are not zero.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the method's state in plain containers and tensors, so that ``weights_only`` loads it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state. The model (already in its pruned shape) and the optimizer have been loaded before."""
