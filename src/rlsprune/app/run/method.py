"""What a training run asks of a pruning method, so that ours and its rivals plug in alike.

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

The run builds the model and the optimizer; a method gets both, changes the model in place, and cuts the optimizer's
state with it (``rlsprune.prune.surgery.apply_cuts``). The optimizer and all ``Parameter`` objects stay the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import nn

from rlsprune.prune.event import PruneEvent

__all__ = ["Method", "Retained"]


class Retained(NamedTuple):
    """What is left of one layer."""

    nodes: int
    """Features, or channels times the size of their map, that the layer puts out; for ``"input"``: that are read."""
    weights: int
    """Weights without biases that are not zeroed out by the method; 0 for ``"input"``."""
    channels: int
    """That the layer puts out: features, or the channels of a convolution; for ``"input"``: that are read."""


class Method(Protocol):
    """A pruning method as a run drives it.

    Epochs count from 1. A method that prunes once takes ``prune_epoch`` and does it in ``end_epoch(prune_epoch, …)``.
    """

    @property
    def settled(self) -> bool:
        """Whether nothing depends on the gate's loss any more, so that held-out images may be trained on."""

    @property
    def ended(self) -> bool:
        """Whether no prune will come any more."""

    def follow(self, copy: nn.Module) -> None:
        """Prunes a copy of the network (a moving average of it, say) with the network from now on."""

    def weigh_by(self, held_out_loss: Callable[[], float]) -> None:
        """Gives the method a held-out loss by which it may measure what cutting a layer costs."""

    def after_backward(self) -> None:
        """Gradients are there and the optimizer has not stepped yet."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def spent(self, share: float) -> None:
        """How much of its time the run has used; told before each ``end_epoch`` of a run that has no set epochs."""

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """The epoch is over; may prune.

        Args:
            epoch: The number of epochs trained, from 1.
            loss: What the run's gate looks at.

        Returns:
            An event if the weights or the shape of the network changed here in any way (zeroing weights counts), as
            then the run evaluates again; else None.
        """

    def finish(self) -> PruneEvent | None:
        """The last epoch is over: leave the network that is to be kept. Called once, after ``end_epoch``."""

    def gate_level(self) -> float | None:
        """What the loss has to get below before the next prune; None if the method does not wait for that."""

    def missed_target(self) -> float | None:
        """The share of the parameters that the method was to get down to and has not; None if there is none."""

    def retained(self) -> Mapping[str, Retained]:
        """What is left, per layer, ``"input"`` first; weights that the method holds at zero do not count.

        ``rlsprune.app.run.counting.count_retained(model, example_inputs)`` counts the network as it stands,
        ``count_retained(model, example_inputs, zeros=False)`` only weights that are not zero.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the rest of the run depends on, in plain containers and tensors, so that ``weights_only`` loads it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state. The model (already in its pruned shape) and the optimizer have been loaded before."""
