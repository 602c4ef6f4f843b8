"""`rlsprune run`: starts or resumes a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsprune.app.cli import folders, options
from rlsprune.app.cli.execute import Shown, execute
from rlsprune.app.config.experiment import RunConfig, make_config

if TYPE_CHECKING:
    from rlsprune.app.run.folder import RunFolder
    from rlsprune.app.run.observer import Observer

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """Examples: `rlsprune run` (the embedded digits, about a minute) ·
`rlsprune run mnist-fnn --preset paper --method rls-paper --seed 1` ·
`rlsprune run --resume runs/digits-fnn-rls-seed0` ·
`torchrun --nproc-per-node 2 -m rlsprune run` (each process takes its share of every batch)"""

_WITH_RESUME = {"resume", "device", "on_fault", "data_dir", "logger", "quiet", "as_json"}


@options.with_training
def run(
    context: typer.Context,
    training: dict[str, Any],
    experiment: options.ExperimentName = "digits-fnn",
    method: options.MethodName = "rls",
    ratio: options.Ratio = None,
    rival_ratio: options.RivalRatio = None,
    prune_epoch: options.PruneEpoch = None,
    seed: options.Seed = 0,
    shape_from: Annotated[
        Path | None,
        typer.Option("--from", help="For scratch: the run of rls whose shape to train. Default: a new run of rls."),
    ] = None,
    out: options.Out = None,
    resume: options.Resume = None,
    logger: options.Logger = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a network and prune it while it trains."""
    shown = Shown(quiet=quiet, as_json=as_json, loggers=options.loggers(logger))
    if resume is not None:
        folders.refuse_other_options(context, _WITH_RESUME)
        of_fit = f"resume it with `rlsprune fit --resume {resume}`"
        config = folders.read_config(resume, of_fit, training["device"], training["data_dir"])
        config = replace(config, on_fault=training["on_fault"] or config.on_fault)
        _execute(config, resume, shown)
        return
    settings = {"seed": seed, **options.settings(training)}
    own: dict[str, Any] = {
        "ratio": ratio,
        "rival_ratio": rival_ratio,
        "prune_epoch": prune_epoch,
    }
    config = make_config(experiment, method, **own, **settings)
    folder = folders.new_folder(f"{config.experiment}-{config.method}-seed{config.seed}", out)
    if method == "scratch":
        source = shape_from or _run_of_shape(settings, experiment, folder, quiet or as_json)
        config = replace(config, shape_from=str(source.resolve()))
    _execute(config, folder, shown)


def _execute(config: RunConfig, path: Path, shown: Shown) -> None:
    def train(folder: RunFolder, observer: Observer) -> dict[str, Any]:
        from rlsprune.app.experiments.recipe import run as run_experiment

        return folder.read_summary() if folder.finished else run_experiment(config, folder, observer)

    def pictures(summary: dict[str, Any]) -> dict[str, Callable[[Path], object]]:
        if summary.get("mean_input") is None:
            return {}  # no pixels were pruned
        from rlsprune.app.experiments.figures import draw_pixels

        return {"pixels.png": partial(draw_pixels, summary)}

    execute("run", path, train, shown, pictures)


def _run_of_shape(settings: dict[str, Any], experiment: str, folder: Path, quiet: bool) -> Path:
    """Runs `rls` in a folder beside that of `scratch`, unless it is already finished there."""
    source = folder.with_name(f"{folder.name}-shape")
    _execute(make_config(experiment, "rls", **settings), source, Shown(quiet=quiet))
    return source
