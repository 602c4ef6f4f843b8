"""Our own pruning method, adapted to a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.config.settings import PruningSettings
from rlsprune.app.run.unpruned import NoPruning
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.pruner import Pruner

__all__ = ["RLSPruning"]


class RLSPruning(NoPruning):
    """`rlsprune.Pruner` with a run's settings. It stops pruning towards the end of the run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        settings: PruningSettings,
        epochs: int | None,
        warmup_epochs: int,
    ) -> None:
        """Finds what can be pruned.

        Args:
            model: The network.
            optimizer: The optimizer of its parameters.
            example_inputs: A batch of its input; only its shape matters.
            settings: The settings of the pruner.
            epochs: Number of epochs of the whole run; None if `spent` is called instead.
            warmup_epochs: q, the number of epochs before the first prune.
        """
        super().__init__(model, example_inputs)
        self._reunite, self._target, self._allocate = settings.reunite, settings.target, settings.allocate
        self._target_of, self._features = settings.target_of, settings.features
        # Even a short run prunes once.
        self._first_prune = warmup_epochs + 1
        self._last_prune = math.inf if epochs is None else epochs - math.ceil(epochs * settings.settle)
        self._settle, self._settling = settings.settle, False
        self.pruner = Pruner(
            model,
            optimizer,
            example_inputs,
            ratio=settings.ratio,
            warmup_epochs=warmup_epochs,
            criterion=settings.criterion,
            compensate=settings.compensate,
            inverse=settings.inverse,
            statistics=settings.statistics,
            patience=settings.patience,
            target={
                **({} if settings.target is None else {settings.target_of: settings.target}),
                **({} if settings.features is None else {"inputs": settings.features}),
            },
            tolerance=settings.tolerance,
        )

    @property
    def settled(self) -> bool:
        """Returns whether pruning has ended with a network that recovered."""
        return self._reunite and self.pruner.done and self.pruner.recovered

    @property
    def ended(self) -> bool:
        """Returns whether the pruner's target is reached or the run is too near its end."""
        return self.pruner.done

    def follow(self, copy: nn.Module) -> None:
        """Lets the pruner cut the copy with the network and refit it separately."""
        self.pruner.follow(copy)

    def weigh_by(self, held_out_loss: Callable[[], float]) -> None:
        """Lets the pruner allocate its events over the layers by this loss, if the settings say so."""
        if self._allocate:
            self.pruner.held_out_loss = held_out_loss

    def spent(self, share: float) -> None:
        """Stops pruning towards the end of the run."""
        self._settling = share > 1 - self._settle

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Prunes if the gate is open, or rolls back if it stayed shut for too long."""
        seen = len(self.pruner.history)
        if epoch > self._first_prune and (self._settling or epoch > self._last_prune):
            self.pruner.stop()  # later steps still detect whether the network has recovered
        self.pruner.step(loss)
        return self._newest(seen)

    def finish(self) -> PruneEvent | None:
        """Returns to the last network that had recovered, if this one has not."""
        seen = len(self.pruner.history)
        self.pruner.finish()
        kept = self.pruner.kept_inputs
        if self._features is not None and (not isinstance(kept, Tensor) or len(kept) > self._features):
            left = len(kept) if isinstance(kept, Tensor) else "all"
            warnings.warn(
                f"--features {self._features}: {left} columns are left, because the loss did not recover with fewer. "
                "Give more --epochs or a larger --tolerance",
                stacklevel=2,
            )
        return self._newest(seen)

    def gate_level(self) -> float | None:
        """Returns the pruner's gate level, from its first prune until the network has recovered from the last."""
        level = self.pruner.gate_level
        return None if (self.ended and self.pruner.recovered) or math.isinf(level) else level

    def missed_target(self) -> float | None:
        """Returns the run's target unless it is reached; a missed target for the inputs has its own warning."""
        history = self.pruner.history
        if self.pruner.target_reached or self._target is None or not history:
            return None if self.pruner.target_reached else self._target
        first, last = history[0], history[-1]
        share = getattr(last, f"{self._target_of}_after") / max(getattr(first, f"{self._target_of}_before"), 1)
        return None if share <= self._target else self._target

    def state_dict(self) -> dict[str, Any]:
        """Returns the pruner's state."""
        return self.pruner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a pruner's state."""
        self.pruner.load_state_dict(state)

    def _newest(self, seen: int) -> PruneEvent | None:
        return self.pruner.history[-1] if len(self.pruner.history) > seen else None
