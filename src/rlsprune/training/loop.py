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
    """The mean over all examples."""
    last: float
    """The loss of the last minibatch."""


class Evaluation(NamedTuple):
    """The loss and accuracy of a network on a split."""

    loss: float
    accuracy: float
    """Percentage of examples whose class was found."""

    @classmethod
    def of_sums(cls, loss: float, correct: float, seen: float) -> Evaluation:
        """Makes the result from the sum of losses, the number of correct answers and the number of examples."""
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
        optimizer: The optimizer of its parameters.
        batches: The epoch's batches: inputs, and labels or anything else that the loss needs.
        loss_of: A function that calls the network on inputs and returns the loss with the labels.
        guard: The check for numerical faults; None for one that raises.
        after_backward: Called after the backward pass and before the optimizer's step.
        after_step: Called after the optimizer's step.
        on_batch: Called with the number of batches done and the last loss. Reading the loss every time makes the host
            wait for an accelerator.

    Raises:
        FaultError: A number is not finite, a loss has diverged, or every batch was skipped.
        ValueError: There is no batch.
    """
    guard = guard or Guard(model)
    model.train()
    seen, number, last = 0, 0, torch.zeros(())
    sums: list[Tensor] = []  # read once at the end: reading each would make the host wait for an accelerator
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
    """Returns the network with its forward pass in bfloat16, by autocast, and its outputs in float32.

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
    """Returns loss and accuracy in evaluation mode. Restores the mode afterwards."""
    return Evaluation.of_sums(*evaluation_sums(model, batches, loss))


def evaluation_sums(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> tuple[float, float, float]:
    """Returns the arguments of `Evaluation.of_sums`, so that several processes can add theirs up first."""
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
