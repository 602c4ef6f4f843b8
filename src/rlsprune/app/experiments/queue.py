"""Which runs a comparison or a sweep consists of. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.experiments.registry import BASELINES, METHODS

__all__ = ["COMPARED", "PlannedRun", "comparison", "sweep", "twin_of"]

COMPARED = tuple(method for method in METHODS if method != "none")
"""What a comparison compares."""

_FOR = {
    "ratio": ("rls", "rls-paper"),
    "rival_ratio": BASELINES,
    **dict.fromkeys(("target", "target_of"), ("rls", *BASELINES)),
    **dict.fromkeys(("tolerance", "allocate"), ("rls",)),
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
    twin: str | None = None
    """The label of its unpruned twin; None if it is one itself."""


def twin_of(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """The label of a run's unpruned twin, which is trained alike, and what `make_config` makes it of."""
    alike: dict[str, Any] = {"recipe": config.recipe, "optimizer": config.optimizer}
    if config.method == "net-slimming":
        label = "net-slimming-unpruned"
        alike |= {"method": "net-slimming", "unpruned": True}
    else:
        label = "rls-unpruned" if alike == {"recipe": "ours", "optimizer": "rls"} else f"none-{config.optimizer}"
        alike |= {"method": "none"}
    own = config.recipe == "paper" or label == "rls-unpruned"
    return (label if own else f"{label}-{config.recipe}"), alike


def comparison(name: str, methods: Iterable[str], seeds: Sequence[int], out: Path, **options: Any) -> list[PlannedRun]:
    """The runs of `methods` and of their unpruned twins, for every seed.

    Args:
        name: The experiment.
        methods: Some of `COMPARED`.
        seeds: One run each.
        out: The folder that holds the runs' folders.
        **options: As `make_config` takes them; those that are only for some methods go to these, and none of those to
            the twins.
    """
    methods = list(dict.fromkeys(methods))
    special = {option: options.pop(option, None) for option in _FOR}
    if "scratch" in methods and "rls" not in methods:
        methods.insert(0, "rls")  # whose shape it takes
    for option, value in special.items():
        if value is not None and not set(_FOR[option]) & set(methods):
            named = option.replace("_", "-")
            raise ValueError(f"--{named} is for {', '.join(_FOR[option])}, not for {', '.join(methods)}: leave it out")
    runs = []
    for seed in seeds:
        twins, pruned = {}, []
        for method in methods:
            own = {option: value for option, value in special.items() if method in _FOR[option]}
            config = make_config(name, method, seed=seed, **own, **options)
            label, settings = twin_of(config)
            twins[label] = make_config(name, seed=seed, **{**options, **settings})
            pruned.append(PlannedRun(method, config, _folder(out, method, seed), twin=label))
        runs += [PlannedRun(label, config, _folder(out, label, seed)) for label, config in twins.items()]
        runs += pruned
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
