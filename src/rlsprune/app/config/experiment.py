"""Everything that decides a run's numbers, as it stands in the run's config.json. Light to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlsprune.app.config.base import BaseConfig, check_choice
from rlsprune.app.config.settings import PruningSettings, TrainingSettings, check_option
from rlsprune.app.experiments.registry import BASELINES, METHODS, PRESETS, experiment

__all__ = ["PAPER", "RunConfig", "make_config"]

PAPER = PruningSettings(
    ratio=0.4,
    gate="batch",
    criterion="rls-paper",
    compensate=False,
    inverse="slice",
    statistics="training",
    patience=None,
    settle=0.0,
    tolerance=0.0,
    target=None,
    reunite=False,
)
"""The paper to the letter."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(BaseConfig):
    """A run of an experiment."""

    KNOWN_METHODS = METHODS
    WHAT = "the config of a run"

    preset: str
    prune_epoch: int | None
    """Where the one-shot methods prune; None: never, which makes the method's unpruned twin."""
    train_images: int | None
    test_images: int | None
    shape_from: str | None
    """The run folder that `scratch` takes its shape from."""
    data_dir: str | None
    verify: bool
    rival_ratio: float | None = None
    """What a rival removes of a layer, or of the weights; None for the paper's share."""

    def __post_init__(self) -> None:
        experiment(self.experiment)
        super().__post_init__()
        if self.rival_ratio is not None:
            check_option("rival_ratio", self.rival_ratio, 0 < self.rival_ratio < 1, "in (0, 1)")
            if self.method not in BASELINES:
                raise ValueError(f"--rival-ratio is for {', '.join(BASELINES)}, not for {self.method}")
        for name in ("prune_epoch", "train_images", "test_images"):
            self._check_least(name, 1)

    def differences(self, other: RunConfig) -> list[str]:
        """In words, where two configs would give other numbers; where the data lie does not matter."""
        mine, others = self.to_dict(), other.to_dict()
        ignored = {"data_dir", "verify", "shape_from", "on_fault", "deterministic"}
        return [
            f"{name} {mine[name]!r} instead of {others[name]!r}"
            for name in mine
            if name not in ignored and mine[name] != others[name]
        ]


def make_config(
    name: str,
    method: str = "rls",
    *,
    optimizer: str | None = None,
    preset: str = "short",
    ratio: float | None = None,
    target: float | None = None,
    tolerance: float | None = None,
    allocate: bool | None = None,
    gate: str | None = None,
    augment: bool | None = None,
    unpruned: bool = False,
    like_rls: bool = False,
    **given: Any,
) -> RunConfig:
    """Completes what was asked for by the experiment's preset and the method's own settings.

    Args:
        name: The experiment.
        method: One of `METHODS`.
        optimizer: None for the method's own: RLS for ours, SGD for the rivals.
        preset: "short" or "paper".
        ratio: ξ of our methods.
        target: The share of the parameters at which `rls` stops pruning; None for the experiment's.
        tolerance: How far above the least loss at any prune, as a share of it, the gate of `rls` still opens.
        allocate: Whether `rls` takes from each layer what costs the held-out loss least; None for the experiment's.
        gate: None for the method's own.
        augment: None for the preset's; what is trained as `rls` is augmented unless it is False.
        unpruned: The method's unpruned twin.
        like_rls: Trained as `rls` is; `scratch` always is.
        **given: Other fields of `RunConfig`; None for the preset's.

    Raises:
        ValueError: A name or a value that there is not.
    """
    check_choice("preset", preset, PRESETS)
    check_choice("method", method, METHODS)
    chosen = experiment(name).presets[preset]
    values = {key: value for key, value in given.items() if value is not None}
    ours = {"rls": experiment(name).pruning, "rls-paper": PAPER}.get(method)
    if ratio is not None:
        if ours is None:
            remedy = "what it removes is its --rival-ratio" if method in BASELINES else "leave it out"
            raise ValueError(f"--ratio is for rls and rls-paper, not for {method}: {remedy}")
        ours = replace(ours, ratio=ratio)
    own: dict[str, Any] = {"target": target, "tolerance": tolerance, "allocate": allocate}
    own = {option: value for option, value in own.items() if value is not None}
    if own:
        if ours is None or method != "rls":
            raise ValueError(f"--{next(iter(own))} is for rls: {method} prunes as its paper says")
        ours = replace(ours, **own)
    if ours is not None and gate is not None:
        ours = replace(ours, gate=gate, allocate=ours.allocate if gate == "valid" else bool(allocate))
    small = method in ("rls", "scratch")
    like_rls = like_rls or small
    augmented = like_rls or chosen.augment if augment is None else augment
    epochs, warmup = chosen.length(small)
    epochs, warmup = values.pop("epochs", epochs), values.pop("warmup_epochs", warmup)
    prune_epoch = values.pop("prune_epoch", warmup + 1)
    return RunConfig(
        **{
            "experiment": name,
            "method": method,
            "optimizer": _optimizer(method, optimizer),
            "preset": preset,
            "warmup_epochs": warmup,
            "prune_epoch": None if unpruned else prune_epoch,
            "gate": gate or (ours.gate if ours else "train"),
            "pruning": ours and ours.over(epochs),
            "training": experiment(name).training if like_rls else TrainingSettings(),
            "seed": 0,
            "epochs": epochs,
            "loss": experiment(name).loss,
            "batch_size": chosen.batch_size,
            "train_images": chosen.train_images,
            "test_images": chosen.test_images,
            "augment": chosen.augmentation if augmented else None,
            "device": "cpu",
            "threads": 1,
            "shape_from": None,
            "data_dir": None,
            "verify": True,
            **values,
        }
    )


def _optimizer(method: str, asked: str | None) -> str:
    own = "rls" if method in ("rls", "rls-paper", "scratch", "none") else "sgd"
    if asked not in (None, own) and method not in ("rls", "scratch", "none"):
        raise ValueError(f"--optimizer {asked}: {method} is trained by {own} as in the paper; leave it out")
    return asked or own
