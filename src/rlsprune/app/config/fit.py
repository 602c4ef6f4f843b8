"""Everything that decides a run of a user's own network. Light to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.base import HELD_OUT_SHARE, OPTIMIZERS, BaseConfig, check_choice
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.config.metrics import METRICS, TASKS, find_metrics
from rlsprune.app.config.settings import OURS, RANK, PruningSettings, TrainingSettings, check_option

__all__ = ["FitConfig", "make_fit_config", "names_function"]


@dataclass(frozen=True, kw_only=True)
class FitConfig(BaseConfig):
    """A run of a user's own network; its method is `rls`, `none` (trains only) or `shrink` (when it is trained)."""

    KNOWN_METHODS = ("rls", "none", "shrink")
    KNOWN_LOSSES = tuple(LOSSES)
    WHAT = "the config of a run of `rlsprune fit`"

    model: str
    """`module:function`, or `path/to/file.py:function`."""
    import_from: str
    """The folder in which modules are looked for first."""
    data: str
    weights: str | None
    lr: float | None
    """None until the network is known: what suits it, the optimizer and the weights."""
    image_size: int | None
    channels: int | None
    pruning: PruningSettings
    int8: bool = False
    """Whether the network is written in 8-bit integers, too, and its score measured."""
    baseline: bool = False
    """Whether the unpruned network is trained alike, to compare with."""
    standardise: bool = False
    """Whether the columns of a table are scaled for training; the network that is saved takes them unscaled."""
    task: str | None = None
    """One of `TASKS`; None until the data were read."""
    metric: str | None = None
    """The score that counts, one of `METRICS`; None until the task is known."""
    class_weights: str | None = None
    """How much each class counts in the loss, as `rlsprune.app.fit.task.class_weights` reads it."""
    label: tuple[str, ...] = ()
    """The columns of a table that are predicted; none: the last."""
    drop_columns: tuple[str, ...] = ()
    """The columns of a table that are left out."""
    max_drop: float | None = None
    """Of `shrink`: the smallest network is kept whose score falls by no more points."""
    recovery_epochs: int = 2
    """Of `shrink`: epochs of training after each of its rounds, at most; 0 for the closed form alone."""
    classes: tuple[str, ...] = ()
    """The names of the classes, the labels or the targets, once the data were read."""
    columns: tuple[str, ...] = ()
    """The names of a table's other columns, once the data were read."""
    images: tuple[int, int] = (0, 0)
    """How many there are to train and to test with, once the data were read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("channels", self.channels, self.channels in (None, 1, 3), "1 or 3")
        check_option("lr", self.lr, self.lr is None or self.lr > 0, "above 0")
        self._check_least("image_size", 1)
        if self.task is not None:
            check_choice("task", self.task, TASKS)
        if self.metric is not None:
            check_choice("metric", self.metric, tuple(METRICS))
            if self.task is not None:
                find_metrics(self.task, self.metric)
        self._check_least("recovery_epochs", 0)
        check_option("max_drop", self.max_drop, self.max_drop is None or self.max_drop > 0, "above 0")
        if (self.max_drop is None) == (self.method == "shrink"):
            raise ValueError("--max-drop is a limit to shrinking: leave out --no-prune")
        if self.method == "shrink" and (self.gate != "valid" or self.baseline):
            raise ValueError(
                "--max-drop measures the unpruned network on held-out examples: leave out --gate, --baseline"
            )
        if self.baseline and self.method == "none":
            raise ValueError("--baseline trains the unpruned network beside the pruned one: leave out --no-prune")

    @property
    def held_out_share(self) -> float:
        """A fifth where a limit is measured by them."""
        return HELD_OUT_SHARE if self.max_drop is None else 1 / 5

    def unpruned(self) -> FitConfig:
        """The same network trained without pruning, on the images too that the gate would hold out."""
        return replace(self, method="none", gate="train", baseline=False, int8=False, classes=(), images=(0, 0))


def names_function(data: str) -> bool:
    """Whether data are what a function gives, `module:function` or `path/to/file.py:function`, and not a path."""
    place, colon, name = data.rpartition(":")
    return bool(colon and place) and name.isidentifier() and not Path(data).exists()


def _absolute(spec: str) -> str:
    """`path/to/file.py:function` from anywhere; `module:function` as it is."""
    file, colon, function = spec.rpartition(":")
    return f"{Path(file).absolute()}{colon}{function}" if file.endswith(".py") else spec


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
    allocate: bool | None = None,
    features: int | None = None,
    epochs: int = 20,
    warmup_epochs: int | None = None,
    average: float = 1.0,
    **given: Any,
) -> FitConfig:
    """Completes what was asked for.

    Args:
        model: `module:function`, or `path/to/file.py:function`.
        data: A folder of images, a table, or `module:function` for the user's own datasets.
        weights: A file to start from.
        optimizer: "rls", "adamw" or "sgd".
        lr: None for what suits the optimizer and the network, lower with `weights`.
        ratio: ξ, the share of a layer that may go at an event.
        target: The share of the parameters at which pruning ends.
        tolerance: How far above the least loss at any prune, as a share of it, counts as recovered; None for
            what the experiments use.
        allocate: Whether an event takes from each layer what costs the held-out loss least, and no more than raises it
            by a quarter; None for yes, unless the gate is another loss or columns are counted.
        features: How many columns of a table are kept.
        epochs: In all.
        warmup_epochs: Epochs before the first prune; None for a tenth of all, or one with `weights`.
        average: See `TrainingSettings`.
        **given: Other fields of `FitConfig`.

    Raises:
        ValueError: A value that there is not.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    limited = given.get("max_drop") is not None
    if limited and (features is not None or tolerance is not None or allocate):
        raise ValueError("--max-drop decides what goes by the score: leave out --features, --tolerance, --allocate")
    if not limited and given.get("recovery_epochs") is not None:
        raise ValueError("--recovery-epochs are those of --max-drop: give both, or leave it out")
    if limited:
        given = {"method": "shrink", **{name: value for name, value in given.items() if value is not None}}
        epochs = epochs if weights is None else 1  # of looking at it: given weights are not trained first
    gate = given.pop("gate", None) or OURS.gate
    if allocate is None:
        allocate = gate == "valid" and not limited and features is None
    pruning = replace(OURS, gate=gate, ratio=ratio, target=target, allocate=allocate, features=features)
    if tolerance is not None:
        pruning = replace(pruning, tolerance=tolerance)
    if warmup_epochs is None:
        warmup_epochs = max(1, epochs // 10) if weights is None else 1
    return FitConfig(
        **{
            "experiment": model,
            "method": "rls",
            "model": _absolute(model),
            "import_from": str(Path.cwd()),
            "data": _absolute(str(data)) if names_function(str(data)) else str(Path(data).absolute()),
            "weights": None if weights is None else str(Path(weights).absolute()),
            "optimizer": optimizer,
            "lr": lr,
            "loss": None,
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
            "standardise": True,
            "training": TrainingSettings(lr_decay=OURS.settle, average=average, rank=RANK),
            **{name: value for name, value in given.items() if value is not None},
        }
    )
