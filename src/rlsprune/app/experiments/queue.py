"""Which runs a comparison or a sweep consists of. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.experiments.registry import BASELINES, METHODS

__all__ = ["COMPARED", "TWINS", "PlannedRun", "comparison", "sweep", "twin_of"]

COMPARED = tuple(method for method in METHODS if method != "none")
"""What a comparison compares."""

TWINS: dict[str, dict[str, Any]] = {
    "rls-unpruned": {"method": "none", "optimizer": "rls", "like_rls": True},
    "none-rls": {"method": "none", "optimizer": "rls"},
    "none-sgd": {"method": "none", "optimizer": "sgd"},
    "net-slimming-unpruned": {"method": "net-slimming", "unpruned": True},
}
"""The unpruned networks that the pruned ones are held against."""

_FOR = {
    "ratio": ("rls", "rls-paper"),
    "rival_ratio": BASELINES,
    **dict.fromkeys(("target", "tolerance", "allocate"), ("rls",)),
}
"""Option → the methods that it is for."""


@dataclass(frozen=True)
class PlannedRun:
    """A run and the folder that it goes to."""

    label: str
    """The method, the unpruned twin, or the sweep's ratio."""
    config: RunConfig
    folder: Path
    after: Path | None = None
    """The folder of a run that has to be finished first."""


def twin_of(method: str) -> str:
    """The unpruned twin of a method."""
    if method == "net-slimming":
        return "net-slimming-unpruned"
    return {"rls": "rls-unpruned", "scratch": "rls-unpruned", "rls-paper": "none-rls"}.get(method, "none-sgd")


def comparison(name: str, methods: Iterable[str], seeds: Sequence[int], out: Path, **options: Any) -> list[PlannedRun]:
    """The runs of `methods` and of their unpruned twins, for every seed.

    Args:
        name: The experiment.
        methods: Some of `COMPARED`.
        seeds: One run each.
        out: The folder that holds the runs' folders.
        **options: As `make_config` takes them; those that are only for some methods go to these.
    """
    methods = list(dict.fromkeys(methods))
    special = {option: options.pop(option, None) for option in _FOR}
    if "scratch" in methods and "rls" not in methods:
        methods.insert(0, "rls")  # whose shape it takes
    for option, value in special.items():
        if value is not None and not set(_FOR[option]) & set(methods):
            named = option.replace("_", "-")
            raise ValueError(f"--{named} is for {', '.join(_FOR[option])}, not for {', '.join(methods)}: leave it out")
    twins = list(dict.fromkeys(map(twin_of, methods)))
    runs = []
    for seed in seeds:
        for label in [*twins, *methods]:
            settings = TWINS.get(label, {"method": label})
            own = {option: value for option, value in special.items() if label in _FOR[option]}
            config = make_config(name, seed=seed, **settings, **own, **options)
            runs.append(PlannedRun(label, config, _folder(out, label, seed)))
    return [_after_rls(run, out) if run.label == "scratch" else run for run in runs]


def sweep(
    name: str, method: str, ratios: Sequence[float], seeds: Sequence[int], out: Path, **options: Any
) -> list[PlannedRun]:
    """The runs of one of our methods at several ratios ξ."""
    return [
        PlannedRun(label, make_config(name, method, seed=seed, ratio=ratio, **options), _folder(out, label, seed))
        for seed in seeds
        for ratio in ratios
        for label in [f"{method}-{100 * ratio:g}"]
    ]


def _after_rls(run: PlannedRun, out: Path) -> PlannedRun:
    source = _folder(out, "rls", run.config.seed)
    return replace(run, config=replace(run.config, shape_from=str(source)), after=source)


def _folder(out: Path, label: str, seed: int) -> Path:
    return out / f"{label}-seed{seed}"
