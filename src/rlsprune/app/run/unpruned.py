"""Training without pruning: what every method is built on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from rlsprune.app.run.counting import count_retained
from rlsprune.app.run.method import Retained
from rlsprune.prune.event import PruneEvent

__all__ = ["NoPruning"]


class NoPruning:
    """Trains and nothing else; see ``rlsprune.app.run.method.Method`` for what a run asks of a method."""

    def __init__(self, model: nn.Module, example_inputs: Tensor) -> None:
        self.model, self.example_inputs = model, example_inputs

    @property
    def settled(self) -> bool:
        """Held-out images stay held out."""
        return False

    @property
    def ended(self) -> bool:
        """A method that waits for no loss has no end to tell."""
        return False

    def follow(self, copy: nn.Module) -> None:
        """The copy keeps its shape, as the network does."""

    def weigh_by(self, held_out_loss: Callable[[], float]) -> None:
        """Nothing is cut."""

    def after_backward(self) -> None:
        """Nothing to do."""

    def after_step(self) -> None:
        """Nothing to do."""

    def spent(self, share: float) -> None:
        """Does not depend on it."""

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Never prunes."""
        return None

    def finish(self) -> PruneEvent | None:
        """Keeps the network."""
        return None

    def gate_level(self) -> float | None:
        """Waits for no loss."""
        return None

    def missed_target(self) -> float | None:
        """Has none."""
        return None

    def retained(self) -> Mapping[str, Retained]:
        """The network as it stands."""
        return count_retained(self.model, self.example_inputs)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""
