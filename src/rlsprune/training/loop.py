"""One epoch of training, and the evaluation on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from rlsprune.app.run.method import Method
from rlsprune.app.run.share import Share
from rlsprune.model.modes import evaluating
from rlsprune.training.guard import FaultError, Guard

__all__ = ["LOSSES", "Batch", "EpochLoss", "Evaluation", "Loss", "evaluate", "mean_squared_error", "train_epoch"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) → the mean loss of the batch."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""

ALONE = Share()
"""Everything, in one process."""


def mean_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Eq. (15) on one-hot targets: half the squared error, summed over the outputs, averaged over the batch."""
    targets = F.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)
    return (outputs - targets).square().sum() / (2 * len(outputs))


LOSSES: dict[str, Loss] = {"mse": mean_squared_error, "cross-entropy": F.cross_entropy}


class EpochLoss(NamedTuple):
    """The losses of one epoch of training."""

    mean: float
    """Over all images."""
    last: float
    """Of the last minibatch."""


class Evaluation(NamedTuple):
    """How a network does on a split."""

    loss: float
    accuracy: float
    """Percentage of images whose class was found."""


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    loss_function: Loss,
    method: Method,
    on_batch: Callable[[int, Tensor], None] = lambda number, loss: None,
    share: Share = ALONE,
    guard: Guard | None = None,
) -> EpochLoss:
    """Trains one epoch.

    Args:
        model: The network.
        optimizer: Of its parameters.
        batches: The epoch's batches.
        loss_function: Of outputs and labels.
        method: Gets its say before and after each step.
        on_batch: Told the number of batches done and the loss of the last, which it had better not look at each time
            on an accelerator.
        share: Which part of each batch is this process's.
        guard: Looks for numerical faults; None for one that raises.

    Raises:
        FaultError: A number that is not finite, or a loss that has diverged.
    """
    guard = guard or Guard(model)
    model.train()
    seen, number, last = 0, 0, torch.zeros(())
    sums: list[Tensor] = []  # read once at the end: looking at each would make the host wait for an accelerator
    for number, batch in enumerate(batches, 1):
        inputs, labels, weight = share.of_batch(*batch)
        loss = loss_function(model(inputs), labels) if guard.inputs(inputs) else None
        if loss is not None and guard.loss(loss):
            if weight != 1:
                loss = weight * loss
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            method.after_backward()
            if guard.step(optimizer):
                method.after_step()
                last = loss.detach()
                sums.append(last * len(batch[1]))
                seen += len(batch[1])
        on_batch(number, last)
    guard.last_step(optimizer)
    if not sums and number:
        raise FaultError("every batch was left out", f"{number} batches")
    if not sums:
        raise ValueError("there is no batch to train on: take more training images or a smaller batch_size")
    losses = EpochLoss(*share.means([_total(sums) / seen, float(last)]))
    guard.epoch_loss("training", losses.mean)
    return losses


def evaluate(model: nn.Module, batches: Iterable[Batch], loss_function: Loss, share: Share = ALONE) -> Evaluation:
    """Loss and accuracy, in evaluation mode; the mode is put back after."""
    losses, corrects, seen = [], [], 0
    with evaluating(model):
        for inputs, labels in share.of_batches(batches):
            outputs = model(inputs)
            losses.append(loss_function(outputs, labels) * len(labels))
            corrects.append((outputs.argmax(-1) == labels).sum())
            seen += len(labels)
    loss, correct, images = share.totals([_total(losses), _total(corrects), seen])
    return Evaluation(loss / images, 100 * correct / images)


def _total(values: list[Tensor]) -> float:
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0  # on the CPU: Metal has no float64
