"""Training without pruning, the base of every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from rlsprune.app.run.counting import count_retained
from rlsprune.app.run.method import Retained
from rlsprune.prune.event import PruneEvent

__all__ = ["NoPruning"]


class NoPruning:
    """Trains without pruning; ``rlsprune.app.run.method.Method`` describes the interface."""

    def __init__(self, model: nn.Module, example_inputs: Tensor) -> None:
        self.model, self.example_inputs = model, example_inputs

    @property
    def settled(self) -> bool:
        """Returns False: held-out images stay held out."""
        return False

    @property
    def ended(self) -> bool:
        """Returns False: a method that waits for no loss does not announce its end."""
        return False

    def follow(self, copy: nn.Module) -> None:
        """Does nothing: the copy keeps its shape, as the network does."""

    def weigh_by(self, held_out_loss: Callable[[], float]) -> None:
        """Does nothing: no layer is cut."""

    def after_backward(self) -> None:
        """Does nothing."""

    def after_step(self) -> None:
        """Does nothing."""

    def spent(self, share: float) -> None:
        """Does nothing."""

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Never prunes."""
        return None

    def finish(self) -> PruneEvent | None:
        """Keeps the network."""
        return None

    def gate_level(self) -> float | None:
        """Returns None: the method waits for no loss."""
        return None

    def missed_target(self) -> float | None:
        """Returns None: the method has no target."""
        return None

    def retained(self) -> Mapping[str, Retained]:
        """Counts the network as it stands."""
        return count_retained(self.model, self.example_inputs)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""
