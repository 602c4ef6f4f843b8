"""Algorithm 1's gate, which decides when to prune, and the patience that ends the waiting for it to open."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from rlsprune.model.arguments import check_argument, is_count


class Decision(Enum):
    """The action that an epoch's loss calls for."""

    TRAIN = "train on"
    PRUNE = "prune"
    ROLL_BACK = "go back to the last network that had recovered"


@dataclass
class Gate:
    """A gate that opens after ``warmup_epochs`` if the loss is below the least loss at any prune, up to a tolerance.

    Without a tolerance the least loss is that at the last prune, as in Algorithm 1. With one, comparing with the least
    loss keeps the loss from drifting away in many small steps.
    """

    warmup_epochs: int  # q
    patience: int | None
    tolerance: float = 0.0
    epoch: int = 0
    loss: float = math.inf
    """The least loss at any prune so far; ∞ before the first."""
    waited: int = 0
    """Number of epochs without recovery since the last prune."""
    recovered: bool = True
    """Whether the loss has been below the gate since the last prune."""

    def __post_init__(self) -> None:
        check_argument(
            "warmup_epochs", self.warmup_epochs, is_count(self.warmup_epochs, 0), "a whole number, at least 0"
        )
        valid = self.patience is None or is_count(self.patience)
        check_argument("patience", self.patience, valid, "None or a whole number, at least 1")
        check_argument("tolerance", self.tolerance, lambda share: 0 <= share < math.inf, "at least 0")

    @property
    def level(self) -> float:
        """Returns the value that the loss must fall below."""
        return (1 + math.copysign(self.tolerance, self.loss)) * self.loss

    def step(self, loss: float) -> Decision:
        """Counts an epoch, and decides by its loss what to do."""
        self.epoch += 1
        if self.epoch <= self.warmup_epochs:
            return Decision.TRAIN
        if loss < self.level:
            self.waited, self.recovered = 0, True
            return Decision.PRUNE
        self.waited += not self.recovered
        if self.patience is not None and self.waited >= self.patience:
            return Decision.ROLL_BACK
        return Decision.TRAIN

    def pruned(self, loss: float, changed: bool) -> None:
        """Lowers the gate to the loss at this prune, if that is less. A changed network then has to recover."""
        self.loss, self.waited, self.recovered = min(self.loss, loss), 0, not changed

    def state_dict(self) -> dict[str, Any]:
        """Returns the gate as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of another gate. Keeps its own settings."""
        for name in ("epoch", "loss", "waited", "recovered"):
            setattr(self, name, state[name])
