"""One epoch of training, and the evaluation on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.model.calls import batch_size
from rlsprune.model.modes import evaluating
from rlsprune.training.guard import FaultError, Guard

__all__ = ["Batch", "EpochLoss", "Evaluation", "Loss", "evaluate", "evaluation_sums", "in_bfloat16", "train_epoch"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) → the mean loss of the batch."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""


class EpochLoss(NamedTuple):
    """The losses of one epoch of training."""

    mean: float
    """Over all examples."""
    last: float
    """The loss of the last minibatch."""


class Evaluation(NamedTuple):
    """The loss and accuracy of a network on a split."""

    loss: float
    accuracy: float
    """Percentage of examples whose class was found."""

    @classmethod
    def of_sums(cls, loss: float, correct: float, seen: float) -> Evaluation:
        """Makes the result from the sum of losses, the number of right answers and the number of examples."""
        return cls(loss / seen, 100 * correct / seen)


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[tuple[Any, Any]],
    loss_of: Callable[[Any, Any], Tensor],
    *,
    guard: Guard | None = None,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    on_batch: Callable[[int, Tensor], None] = lambda number, loss: None,
) -> EpochLoss:
    """Trains one epoch.

    Args:
        model: The network.
        optimizer: Of its parameters.
        batches: The epoch's batches: inputs, and labels or whatever else the loss needs.
        loss_of: From both to the loss: it calls the network.
        guard: Looks for numerical faults; None for one that raises.
        after_backward: Called when the gradients are there and the optimizer has not stepped yet.
        after_step: Called when the optimizer has stepped.
        on_batch: Told the number of batches done and the loss of the last, which it had better not look at each time
            on an accelerator.

    Raises:
        FaultError: A number that is not finite, or a loss that has diverged.
    """
    guard = guard or Guard(model)
    model.train()
    seen, number, last = 0, 0, torch.zeros(())
    sums: list[Tensor] = []  # read once at the end: looking at each would make the host wait for an accelerator
    for number, (inputs, labels) in enumerate(batches, 1):
        loss = loss_of(inputs, labels) if guard.inputs(inputs) else None
        if loss is not None and guard.loss(loss):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            after_backward()
            if guard.step(optimizer):
                after_step()
                last = loss.detach()
                sums.append(last * batch_size(inputs))
                seen += batch_size(inputs)
        on_batch(number, last)
    guard.last_step(optimizer)
    if not sums and number:
        raise FaultError("every batch was left out", f"{number} batches")
    if not sums:
        raise ValueError("there is no batch to train on: take more training images or a smaller batch_size")
    return EpochLoss(_total(sums) / seen, float(last))


def in_bfloat16(network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The network with its forward pass in bfloat16, by autocast, and its outputs in float32.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> in_bfloat16(layer)(torch.ones(3, 4)).dtype
        torch.float32
    """

    def forward(inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = network(inputs)
        return outputs.float()

    return forward


def evaluate(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Evaluation:
    """Loss and accuracy, in evaluation mode. Restores the mode afterwards."""
    return Evaluation.of_sums(*evaluation_sums(model, batches, loss))


def evaluation_sums(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> tuple[float, float, float]:
    """What `Evaluation.of_sums` takes, so that several processes can add theirs up first."""
    losses, corrects, seen = [], [], 0
    with evaluating(model):
        for inputs, labels in batches:
            outputs = model(inputs)
            losses.append(loss(outputs, labels) * len(labels))
            corrects.append((outputs.argmax(-1) == labels).sum())
            seen += len(labels)
    return _total(losses), _total(corrects), seen


def _total(values: list[Tensor]) -> float:
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0  # on the CPU: Metal has no float64
