"""Everything that decides a run of a user's own network. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import GATES, LOSSES
from rlsprune.app.config.plain import from_plain
from rlsprune.app.config.settings import ON_FAULT, OURS, RANK, PruningSettings, TrainingSettings, check_option
from rlsprune.app.data.augmentation import parse_augmentation
from rlsprune.app.experiments.registry import OPTIMIZERS

__all__ = ["FitConfig", "make_fit_config"]

LEARNING_RATES = {"rls": (0.3, 0.1), "adamw": (1e-3, 1e-3), "sgd": (0.1, 0.01)}
"""From scratch, and from pretrained weights; measured in docs/settings.md."""
BATCH_NORM_RATE = 0.1
"""The highest default of RLS for a network with batch norm."""


@dataclass(frozen=True)
class FitConfig:
    """A run, completely: the same config, model, data and machine give the same numbers."""

    experiment: str
    """The model, as it was asked for: what the run is called."""
    method: str
    """`rls`, or `none` to train without pruning."""
    model: str
    """`module:function`, or `path/to/file.py:function`."""
    import_from: str
    """The folder in which modules are looked for first."""
    data: str
    weights: str | None
    optimizer: str
    lr: float | None
    """None until the network is known: what suits it, the optimizer and the weights."""
    loss: str
    gate: str
    seed: int
    epochs: int
    warmup_epochs: int
    batch_size: int
    image_size: int | None
    channels: int | None
    augment: str | None
    device: str
    threads: int
    pruning: PruningSettings
    training: TrainingSettings
    classes: tuple[str, ...] = ()
    """The names of the classes, once the data were read."""
    images: tuple[int, int] = (0, 0)
    """How many there are to train and to test with, once the data were read."""
    on_fault: str = "raise"
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("loss", LOSSES),
            ("gate", GATES),
            ("method", METHODS),
            ("on_fault", ON_FAULT),
        ):
            check_option(name, getattr(self, name), getattr(self, name) in choices, f"one of {', '.join(choices)}")
        if self.augment is not None:
            parse_augmentation(self.augment)
        check_option("channels", self.channels, self.channels in (None, 1, 3), "1 or 3")
        check_option("lr", self.lr, self.lr is None or self.lr > 0, "above 0")
        for name, least in (("epochs", 1), ("warmup_epochs", 0), ("batch_size", 1), ("threads", 1), ("seed", 0)):
            check_option(name, getattr(self, name), getattr(self, name) >= least, f"at least {least}")
        check_option("image_size", self.image_size, self.image_size is None or self.image_size >= 1, "at least 1")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"classes": list(self.classes), "images": list(self.images)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FitConfig:
        """From what JSON had.

        Raises:
            ValueError: Names or values are not those of a config.
        """
        return from_plain(cls, values, "the config of a run of `rlsprune fit`")


METHODS = ("rls", "none")


def make_fit_config(
    model: str,
    data: str | Path,
    *,
    weights: str | Path | None = None,
    optimizer: str = "rls",
    lr: float | None = None,
    ratio: float = OURS.ratio,
    target: float | None = OURS.target,
    tolerance: float | None = None,
    spread: bool = OURS.spread,
    epochs: int = 20,
    warmup_epochs: int | None = None,
    average: float = 1.0,
    **given: Any,
) -> FitConfig:
    """Completes what was asked for.

    Args:
        model: `module:function`, or `path/to/file.py:function`.
        data: A folder of images or an .npz file.
        weights: A file to start from.
        optimizer: "rls", "adamw" or "sgd".
        lr: None for what suits the optimizer and the network, lower with `weights`.
        ratio: ξ, the share of a layer that may go at an event.
        target: The share of the parameters at which pruning ends.
        tolerance: How far above the least loss at any prune, as a share of it, counts as recovered; None for
            what the experiments use.
        spread: Whether an event takes from each layer what costs the held-out loss least.
        epochs: In all.
        warmup_epochs: Epochs before the first prune; None for a tenth of all, or one with `weights`.
        average: See `TrainingSettings`.
        **given: Other fields of `FitConfig`.

    Raises:
        ValueError: A value that there is not.
    """
    check_option("optimizer", optimizer, optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
    file, colon, function = model.rpartition(":")
    absolute = f"{Path(file).absolute()}{colon}{function}" if file.endswith(".py") else model
    gate = given.pop("gate", None) or OURS.gate
    pruning = replace(OURS, gate=gate, ratio=ratio, target=target, spread=spread)
    if tolerance is not None:
        pruning = replace(pruning, tolerance=tolerance)
    if warmup_epochs is None:
        warmup_epochs = max(1, epochs // 10) if weights is None else 1
    return FitConfig(
        **{
            "experiment": model,
            "method": "rls",
            "model": absolute,
            "import_from": str(Path.cwd()),
            "data": str(Path(data).absolute()),
            "weights": None if weights is None else str(Path(weights).absolute()),
            "optimizer": optimizer,
            "lr": lr,
            "loss": "cross-entropy",
            "gate": gate,
            "seed": 0,
            "epochs": epochs,
            "warmup_epochs": warmup_epochs,
            "batch_size": 64,
            "image_size": None,
            "channels": None,
            "augment": None,
            "device": "cpu",
            "threads": 1,
            "pruning": pruning.over(epochs),
            "training": TrainingSettings(lr_decay=OURS.settle, average=average, rank=RANK),
            **{name: value for name, value in given.items() if value is not None},
        }
    )
