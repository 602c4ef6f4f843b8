"""Training after a cut, until the score is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlsprune.model.progress import Progress
from rlsprune.optim.rls import RLS
from rlsprune.shrinking.front import Front
from rlsprune.training.batches import GivenBatches
from rlsprune.training.guard import Guard
from rlsprune.training.loop import train_epoch
from rlsprune.training.objective import Objective

__all__ = ["Recovery"]


class Recovery:
    """Training after a cut."""

    def __init__(
        self,
        model: nn.Module,
        batches: GivenBatches,
        objective: Objective,
        optimizer: Callable[[nn.Module], Optimizer],
        epochs: int,
        tell: Progress,
    ) -> None:
        self._model, self._batches, self._objective = model, batches, objective
        self._make, self._epochs, self._tell = optimizer, epochs, tell
        self._guard = Guard(model)

    def run(self, name: str, front: Front) -> None:
        """Trains until the score is back or the epochs are used up."""
        optimizer, batches = self._make(self._model), len(self._batches)
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
                    self._model, optimizer, self._batches, loss_of, guard=self._guard, on_batch=on_batch
                )
                self._guard.epoch_loss("training", trained.mean)
                front.trained()
                if front.recovered:
                    return
        finally:
            if isinstance(optimizer, RLS):
                optimizer.close()
