"""Training after a cut, until the score is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlsprune.distributed.ranks import Ranks
from rlsprune.model.arguments import shown
from rlsprune.model.progress import Progress
from rlsprune.optim.rls import RLS
from rlsprune.shrinking.front import Front
from rlsprune.training.batches import GivenBatches
from rlsprune.training.guard import Guard
from rlsprune.training.loop import train_epoch
from rlsprune.training.objective import Objective

__all__ = ["Recovery"]


class Recovery:
    """Training after a cut. Several ranks train on their own batches each, and average their gradients."""

    def __init__(
        self,
        model: nn.Module,
        batches: GivenBatches,
        objective: Objective,
        optimizer: Callable[[nn.Module], Optimizer],
        epochs: int,
        tell: Progress,
        ranks: Ranks | None = None,
    ) -> None:
        self._model, self._batches, self._objective = model, batches, objective
        self._make, self._epochs, self._tell, self._ranks = optimizer, epochs, tell, ranks
        self._guard = Guard(model, alone=ranks is None)
        if ranks is not None:
            ranks.agree("the number of batches", len(batches))

    def run(self, name: str, front: Front) -> None:
        """Trains until the score is back or the epochs are used up."""
        optimizer, batches = self._make(self._model), len(self._batches)
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
            raise TypeError(f"optimizer returned {shown(optimizer)}: return a torch.optim optimizer other than LBFGS")
        steps = max(1, self._epochs * batches)
        rate = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))

        def loss_of(inputs: Any, targets: Any) -> Tensor:
            return self._objective.loss(self._model, inputs, targets)

        try:
            for epoch in range(1, self._epochs + 1):
                stage = f"{name}, recovery epoch {epoch} of {self._epochs}"

                def on_batch(number: int, loss: Tensor, stage: str = stage) -> None:
                    rate.step()
                    self._tell(stage, number, batches)

                self._guard.start_epoch(front.epochs + 1, after_prune=epoch == 1)
                trained = train_epoch(
                    self._model,
                    optimizer,
                    self._batches,
                    loss_of,
                    guard=self._guard,
                    after_backward=self._average_gradients,
                    on_batch=on_batch,
                )
                self._guard.epoch_loss("training", self._aligned(trained.mean))
                front.trained()
                if front.recovered:
                    return
        finally:
            if isinstance(optimizer, RLS):
                optimizer.close()

    def _average_gradients(self) -> None:
        """Averages the gradients over the ranks, with one message per dtype."""
        if self._ranks is None:
            return
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in same]).div_(self._ranks.size)
            self._ranks.sum_(flat)
            for gradient, mean in zip(same, torch.split(flat, [gradient.numel() for gradient in same]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def _aligned(self, loss: float) -> float:
        """Returns the mean loss of the ranks, and broadcasts rank 0's buffers."""
        if self._ranks is None:
            return loss
        with torch.no_grad():
            self._ranks.exchange([list(self._model.buffers())])
        return sum(self._ranks.gather(loss)) / self._ranks.size
