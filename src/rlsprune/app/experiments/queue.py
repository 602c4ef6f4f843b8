"""The runs of a comparison or a sweep. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.experiments.registry import BASELINES, METHODS

__all__ = ["COMPARED", "PlannedRun", "comparison", "sweep", "twin_of"]

COMPARED = tuple(method for method in METHODS if method != "none")
"""The methods of a comparison."""

_FOR = {
    "ratio": ("rls", "rls-paper"),
    "rival_ratio": BASELINES,
    **dict.fromkeys(("target", "target_of"), ("rls", *BASELINES)),
    **dict.fromkeys(("tolerance", "allocate"), ("rls",)),
}
"""The methods to which an option applies."""


@dataclass(frozen=True)
class PlannedRun:
    """A run and its folder."""

    label: str
    """The method, the unpruned twin, or the sweep's ratio."""
    config: RunConfig
    folder: Path
    after: Path | None = None
    """The folder of a run that has to be finished first."""
    twin: str | None = None
    """The label of its unpruned twin; None if it is itself unpruned."""


def twin_of(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Returns the label of a run's unpruned twin, which is trained alike, and its options for `make_config`."""
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
    """Plans the runs of `methods` and of their unpruned twins, for every seed.

    Args:
        name: The experiment.
        methods: Some of `COMPARED`.
        seeds: The seeds; each makes one run per method.
        out: The folder that holds the runs' folders.
        **options: Options of `make_config`. Those for only some methods are passed to these methods and not to the
            twins.
    """
    methods = list(dict.fromkeys(methods))
    special = {option: options.pop(option, None) for option in _FOR}
    if "scratch" in methods and "rls" not in methods:
        methods.insert(0, "rls")  # "scratch" takes its shape
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
    """Plans the runs of one of our methods at several ratios ξ."""
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
