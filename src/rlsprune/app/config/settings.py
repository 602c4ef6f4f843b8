"""How a run trains and prunes, as it stands in its config.json. Light to import: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlsprune.model.arguments import check_argument

__all__ = ["ON_FAULT", "OURS", "RANK", "TARGETS", "PruningSettings", "TrainingSettings", "check_option"]

ON_FAULT = ("raise", "skip", "rollback")
"""What a run does about a NaN, an infinity or a loss that diverges: it stops, leaves the batch out, or goes back to its
last checkpoint with half the learning rate."""

TARGETS = {"params": "parameters", "flops": "FLOPs"}
"""Quantities that a target may be a share of, and their names in sentences."""


def check_option(name: str, value: object, valid: bool, expected: str) -> None:
    """Raises ValueError, in the words of the command line, unless a setting is valid."""
    if not valid:
        raise ValueError(f"--{name.replace('_', '-')} {value} is not valid: it must be {expected}")


@dataclass(frozen=True)
class PruningSettings:
    """How `rls` and `rls-paper` prune; see `rlsprune.Pruner`."""

    ratio: float
    """ξ"""
    gate: str
    """The loss that has to recover: the epoch's mean ("train"), its last minibatch ("batch"), held-out ("valid")."""
    criterion: str
    compensate: bool
    inverse: str
    statistics: str
    patience: int | None
    settle: float
    """The last share of the epochs, in which nothing is pruned any more."""
    tolerance: float
    """How far above the least loss at any prune, as a share of it, the gate still opens; 0 for below it."""
    target: float | None
    """The share of the parameters, or FLOPs, at which pruning ends; None for no end but the gate's."""
    reunite: bool
    """Whether the images held out for the gate are trained on once pruning has ended."""
    allocate: bool = False
    """Whether an event takes from each layer what costs the held-out loss least, instead of ξ from all of them."""
    target_of: str = "params"
    """What the target is a share of: one of `TARGETS`."""
    features: int | None = None
    """How many columns of a table are kept; None for as many as pruning leaves."""

    def __post_init__(self) -> None:
        check_option("ratio", self.ratio, 0 < self.ratio < 1, "in (0, 1)")
        check_option("target", self.target, self.target is None or 0 < self.target < 1, "in (0, 1)")
        check_option("target_of", self.target_of, self.target_of in TARGETS, f"one of {', '.join(TARGETS)}")
        check_option("features", self.features, self.features is None or self.features >= 1, "at least 1")
        check_option("tolerance", self.tolerance, 0 <= self.tolerance < math.inf, "a number, at least 0")
        check_option("gate", self.gate, not self.allocate or self.gate == "valid", "valid with --allocate")

    def over(self, epochs: int) -> PruningSettings:
        """Fits the settings to a number of epochs: a long run can wait for recovery for a tenth of its epochs."""
        return self if self.patience is None else replace(self, patience=max(self.patience, epochs // 10))


OURS = PruningSettings(
    ratio=0.2,
    gate="valid",
    criterion="obs",
    compensate=True,
    inverse="schur",
    statistics="exact",
    patience=3,
    settle=0.4,
    tolerance=0.05,
    target=0.1,
    reunite=True,
)
"""What won; see docs/records."""

RANK = 16
"""The rank of P in our own methods, which is the default of `rlsprune.RLS`."""


@dataclass(frozen=True)
class TrainingSettings:
    """How the network is trained, beyond the optimizer's rate. As it stands: the paper's way."""

    lr_decay: float = 0.0
    """The last share of the epochs, in which the learning rate falls linearly to zero, batch by batch."""
    average: float = 0.0
    """What is evaluated and kept is a moving average of the weights that reaches so many epochs back; 0: no average."""
    mean_scale: float = 0.1
    """k of RLS: the less, the longer its steps stay large."""
    rank: int | None = None
    """The rank of P; None for P whole, as in the paper and in all runs of version 0.1.0."""

    def __post_init__(self) -> None:
        check_argument("lr_decay", self.lr_decay, 0 <= self.lr_decay < 1, "in [0, 1)")
        check_option("average", self.average, 0 <= self.average < math.inf, "a number of epochs, at least 0")
        check_argument("mean_scale", self.mean_scale, 0 < self.mean_scale < math.inf, "a number > 0")
        check_argument("rank", self.rank, self.rank is None or self.rank >= 1, "None or at least 1")
