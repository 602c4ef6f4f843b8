"""The settings that every run has, of an experiment or of a user's own network. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from rlsprune.app.config.losses import LOSSES_OF
from rlsprune.app.config.plain import from_plain
from rlsprune.app.config.settings import ON_FAULT, PruningSettings, TrainingSettings, check_option
from rlsprune.app.data.augmentation import parse_augmentation

__all__ = ["BATCH_NORM_RATE", "GATES", "HELD_OUT_SHARE", "LEARNING_RATES", "OPTIMIZERS", "BaseConfig", "check_choice"]

OPTIMIZERS = ("rls", "sgd", "adamw")
GATES = ("train", "batch", "valid")

HELD_OUT_SHARE = 1 / 12
"""The share of the training images that the gate "valid" holds out: 5,000 of MNIST's."""

LEARNING_RATES = {"rls": (0.3, 0.1), "adamw": (1e-3, 1e-3), "sgd": (0.1, 0.01)}
"""From scratch, and from pretrained weights; measured in docs/settings.md."""
BATCH_NORM_RATE = 0.1
"""The highest default of RLS for a network with batch norm."""


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """All settings of a run: the same config, data and machine give the same numbers."""

    KNOWN_METHODS: ClassVar[tuple[str, ...]]
    """What `method` may be."""
    WHAT: ClassVar[str]
    """What it is the config of, for messages."""
    KNOWN_LOSSES: ClassVar[tuple[str, ...]] = LOSSES_OF["classification"]
    """What `loss` may be."""

    experiment: str
    """What the run is called: the experiment, or the model as it was asked for."""
    method: str
    optimizer: str
    loss: str | None
    """None until the task is known."""
    gate: str
    seed: int
    epochs: int
    warmup_epochs: int
    batch_size: int
    augment: str | None
    device: str
    threads: int
    pruning: PruningSettings | None
    """None for methods that are not ours."""
    training: TrainingSettings
    on_fault: str = "raise"
    deterministic: bool = False
    bfloat16: bool = False
    """Whether the forward passes of training run in bfloat16, by autocast. All else stays in float32."""
    cpu_seconds: float | None = None
    """The processor time after which the run ends, instead of after `epochs`, which then only set the patience."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", self.KNOWN_METHODS),
            ("optimizer", OPTIMIZERS),
            ("gate", GATES),
            ("on_fault", ON_FAULT),
        ):
            check_choice(name, getattr(self, name), choices)
        if self.loss is not None:
            check_choice("loss", self.loss, self.KNOWN_LOSSES)
        if self.augment is not None:
            parse_augmentation(self.augment)
        for name, least in (("epochs", 1), ("warmup_epochs", 0), ("batch_size", 1), ("threads", 1), ("seed", 0)):
            self._check_least(name, least)
        check_option("cpu_seconds", self.cpu_seconds, self.cpu_seconds is None or self.cpu_seconds > 0, "above 0")

    @property
    def held_out_share(self) -> float:
        """Of the training examples, for the gate "valid"."""
        return HELD_OUT_SHARE

    def to_dict(self) -> dict[str, Any]:
        """The config as plain values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Makes a config from plain values of JSON.

        Raises:
            ValueError: Names or values are not those of a config.
        """
        return from_plain(cls, values, cls.WHAT)

    def _check_least(self, name: str, least: int) -> None:
        """A number must not be less; None is no number."""
        value = getattr(self, name)
        check_option(name, value, value is None or value >= least, f"at least {least}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError, in the words of the command line, unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"--{name.replace('_', '-')} {value} is not valid: choose one of {', '.join(choices)}")
