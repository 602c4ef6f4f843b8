"""Everything that decides a run's numbers, as it stands in the run's config.json. Light to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlsprune.app.config.base import BaseConfig, check_choice
from rlsprune.app.config.recipes import find_recipe, optimizer_of, rate_of, recipe_of, settings_of
from rlsprune.app.config.settings import TARGETS, PruningSettings, check_option
from rlsprune.app.experiments.registry import BASELINES, METHODS, PRESETS, ZEROING, experiment

__all__ = ["PAPER", "TEST_ON", "RunConfig", "make_config"]

TEST_ON = ("test", "held-out")
"""Where accuracies come from: the test images, or training images that are left out, to choose settings by."""

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
    prune_share: float | None = None
    """Where they prune instead in a run that ends by its processor time, as a share of it; None for `prune_epoch`."""
    train_images: int | None
    test_images: int | None
    shape_from: str | None
    """The run folder that `scratch` takes its shape from."""
    data_dir: str | None
    verify: bool
    rival_ratio: float | None = None
    """What a rival removes of a layer, or of the weights; None for the paper's share."""
    rival_target: float | None = None
    """The share of the parameters, or FLOPs, that a rival leaves, instead of `rival_ratio`."""
    rival_target_of: str = "params"
    """What `rival_target` is a share of: one of `TARGETS`."""
    recipe: str | None = None
    """The recipe that the settings of training come from; None in the files of earlier versions."""
    lr: float | None = None
    """The learning rate; None, as in the files of earlier versions, becomes what suits experiment and optimizer."""
    test_on: str = "test"
    """One of `TEST_ON`."""

    def __post_init__(self) -> None:
        experiment(self.experiment)
        super().__post_init__()
        if self.lr is None:
            object.__setattr__(self, "lr", rate_of(self.experiment, self.method, self.optimizer))
        check_option("lr", self.lr, self.rate > 0, "above 0")
        share = self.prune_share
        timed = self.cpu_seconds is not None
        check_option("prune_share", share, share is None or (timed and 0 < share < 1), "in (0, 1), with --cpu-seconds")
        check_choice("test_on", self.test_on, TEST_ON)
        self._check_rival()
        for name in ("prune_epoch", "train_images", "test_images"):
            self._check_least(name, 1)

    @property
    def rate(self) -> float:
        """The learning rate."""
        assert self.lr is not None
        return self.lr

    def _check_rival(self) -> None:
        if self.rival_ratio is not None:
            check_option("rival_ratio", self.rival_ratio, 0 < self.rival_ratio < 1, "in (0, 1)")
            if self.method not in BASELINES:
                raise ValueError(f"--rival-ratio is for {', '.join(BASELINES)}, not for {self.method}: leave it out")
        if self.rival_target is not None:
            check_option("target", self.rival_target, 0 < self.rival_target < 1, "in (0, 1)")
            check_choice("target_of", self.rival_target_of, TARGETS)
            if self.rival_ratio is not None:
                raise ValueError("--rival-ratio follows from --target: give one of them")
            if self.rival_target_of == "flops" and self.method in ZEROING:
                raise ValueError(
                    f"--target-of flops: {self.method} zeroes weights and does not change the FLOPs; use params"
                )

    def differences(self, other: RunConfig) -> list[str]:
        """Says in words where two configs would give other numbers; the data's folder does not matter."""
        mine, others = self.to_dict(), other.to_dict()
        ignored = {"data_dir", "verify", "shape_from", "on_fault", "deterministic", "recipe"}
        return [
            f"{name} {mine[name]!r} instead of {others[name]!r}"
            for name in mine
            if name not in ignored and mine[name] != others[name]
        ]


def make_config(
    name: str,
    method: str = "rls",
    *,
    recipe: str | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    preset: str = "short",
    ratio: float | None = None,
    target: float | None = None,
    target_of: str | None = None,
    tolerance: float | None = None,
    allocate: bool | None = None,
    gate: str | None = None,
    augment: bool | None = None,
    unpruned: bool = False,
    **given: Any,
) -> RunConfig:
    """Completes what was asked for by the recipe, the experiment's preset and the method's own settings.

    Args:
        name: The experiment.
        method: One of `METHODS`.
        recipe: How to train: one of `RECIPES`. None for the method's own: "ours" for `rls` and `scratch`.
        optimizer: None for the method's own: SGD for the rivals, RLS for all else.
        lr: None for what suits the experiment and the optimizer.
        preset: "short" or "paper".
        ratio: ξ of our methods.
        target: The share of the parameters at which `rls` stops pruning, or that a rival leaves; None for the
            experiment's, and for a rival its `rival_ratio`.
        target_of: What `target` is a share of: one of `TARGETS`.
        tolerance: How far above the least loss at any prune, as a share of it, the gate of `rls` still opens.
        allocate: Whether `rls` takes from each layer what costs the held-out loss least; None for the experiment's.
        gate: None for the method's own.
        augment: None for the recipe's.
        unpruned: The method's unpruned twin.
        **given: Other fields of `RunConfig`; None for the preset's.

    Raises:
        ValueError: A name or a value that there is not.
    """
    check_choice("preset", preset, PRESETS)
    check_choice("method", method, METHODS)
    chosen = experiment(name)
    amount, how = chosen.presets[preset], find_recipe(recipe or recipe_of(method), chosen, preset)
    values = {key: value for key, value in given.items() if value is not None}
    if values.keys() >= {"epochs", "cpu_seconds"}:
        raise ValueError("--cpu-seconds is the alternative to --epochs: give one of them")
    aim = {"target": target, "target_of": target_of}
    ours = _pruning(name, method, ratio=ratio, tolerance=tolerance, allocate=allocate, gate=gate, **aim)
    if method in BASELINES:
        values |= {f"rival_{option}": value for option, value in aim.items() if value is not None}
    epochs, warmup = values.pop("epochs", how.epochs), values.pop("warmup_epochs", how.warmup_epochs)
    prune_epoch = values.pop("prune_epoch", warmup + 1)
    optimizer = optimizer_of(method, optimizer)
    return RunConfig(
        **{
            "experiment": name,
            "method": method,
            "recipe": how.name,
            "optimizer": optimizer,
            "lr": rate_of(name, method, optimizer) if lr is None else lr,
            "preset": preset,
            "warmup_epochs": warmup,
            "prune_epoch": None if unpruned else prune_epoch,
            "gate": gate or (ours.gate if ours else "train"),
            "pruning": ours and ours.over(epochs),
            "training": settings_of(how, method),
            "seed": 0,
            "epochs": epochs,
            "loss": how.loss,
            "batch_size": amount.batch_size,
            "train_images": amount.train_images,
            "test_images": amount.test_images,
            "augment": how.augment if augment is None else amount.augmentation if augment else None,
            "device": "cpu",
            "threads": 1,
            "shape_from": None,
            "data_dir": None,
            "verify": True,
            **values,
        }
    )


def _pruning(
    name: str, method: str, *, ratio: float | None, gate: str | None, allocate: bool | None, **asked: Any
) -> PruningSettings | None:
    """How one of our methods prunes, with what was asked for; None for the others.

    Raises:
        ValueError: Something was asked for that the method does not take.
    """
    ours = {"rls": experiment(name).pruning, "rls-paper": PAPER}.get(method)
    if ratio is not None:
        if ours is None:
            remedy = "what it removes is its --rival-ratio" if method in BASELINES else "leave it out"
            raise ValueError(f"--ratio is for rls and rls-paper, not for {method}: {remedy}")
        ours = replace(ours, ratio=ratio)
    own = {option: value for option, value in {**asked, "allocate": allocate}.items() if value is not None}
    if method in BASELINES:
        own = {option: value for option, value in own.items() if option not in ("target", "target_of")}
    if own:
        if ours is None or method != "rls":
            option = next(iter(own)).replace("_", "-")
            raise ValueError(f"--{option} is for rls: {method} prunes as its paper says")
        ours = replace(ours, **own)
    if ours is not None and gate is not None:
        ours = replace(ours, gate=gate, allocate=ours.allocate if gate == "valid" else bool(allocate))
    return ours
