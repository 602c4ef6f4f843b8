"""`rlsprune compare` and `rlsprune sweep`: many runs, a table or a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsprune.app.cli import options
from rlsprune.app.cli.speech import say
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.queue import COMPARED, PlannedRun
from rlsprune.app.experiments.queue import comparison as plan_comparison
from rlsprune.app.experiments.queue import sweep as plan_sweep
from rlsprune.app.experiments.registry import experiment as find_experiment
from rlsprune.distributed.torchrun import started_by_torchrun

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMPARE_EXAMPLES", "SWEEP_EXAMPLES", "compare", "sweep"]

COMPARE_EXAMPLES = """Examples: `rlsprune compare digits-fnn --jobs 2` ·
`rlsprune compare mnist-fnn --seeds 0,1,2 --methods rls,l1-norm`"""
SWEEP_EXAMPLES = """Examples: `rlsprune sweep digits-fnn --method rls-paper --epochs 60` ·
`RAY_ADDRESS=head:6379 rlsprune sweep mnist-fnn --ray --out /shared/sweep`"""

_IDENTITY = ("experiment", "method", "optimizer", "preset", "seed")


@options.with_training
def compare(
    experiment: options.ExperimentName,
    training: dict[str, Any],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"Methods, separated by commas: {', '.join(COMPARED)}.",
            show_default="all",
            autocompletion=options.completing(COMPARED),
        ),
    ] = ",".join(COMPARED),
    seeds: options.Seeds = "0",
    ratio: options.Ratio = None,
    rival_ratio: options.RivalRatio = None,
    prune_epoch: options.PruneEpoch = None,
    out: options.Out = None,
    jobs: options.Jobs = 1,
    finished: Annotated[
        bool, typer.Option("--finished", help="Run nothing; compare the finished runs in --out.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Run all methods and their unpruned twins, and compare them with the paper's table. Finished runs are kept."""
    folder = _out(out, f"compare-{experiment}-{training['preset']}")
    runs = plan_comparison(
        experiment,
        _methods(methods),
        options.numbers("--seeds", seeds, int),
        folder,
        ratio=ratio,
        rival_ratio=rival_ratio,
        prune_epoch=prune_epoch,
        **options.settings(training, jobs),
    )
    if finished:
        runs = _finished(runs, folder)
    _run(runs, jobs, quiet)

    from rlsprune.app.experiments.compare import compare_runs
    from rlsprune.app.experiments.figures import draw_comparison
    from rlsprune.app.experiments.table import comparison_table
    from rlsprune.app.report import write_report
    from rlsprune.io.atomic import replacing

    comparison = compare_runs(experiment, runs)
    table = comparison_table(comparison)
    for name, text in (("comparison.json", json.dumps(comparison, indent=2) + "\n"), ("comparison.md", table)):
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8")
    draw_comparison(comparison, folder / "comparison.png")
    write_report([run.folder for run in runs], folder / "report.html")
    say(f"{table}\nWritten to {folder / 'comparison.md'}, comparison.json, comparison.png and report.html")


@options.with_training
def sweep(
    experiment: options.ExperimentName,
    training: dict[str, Any],
    method: Annotated[
        str,
        typer.Option("--method", help="rls or rls-paper.", autocompletion=options.completing(("rls", "rls-paper"))),
    ] = "rls",
    ratios: Annotated[str, typer.Option("--ratios", help="Values of ξ, separated by commas.")] = "0.2,0.3,0.4,0.5",
    seed: options.Seed = 0,
    out: options.Out = None,
    jobs: options.Jobs = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on a Ray cluster (RAY_ADDRESS, or a local one) that shares the folder.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Prune at several ratios ξ and draw the paper's three panels. Finished runs are kept."""
    folder = _out(out, f"sweep-{experiment}-{method}-{training['preset']}")
    values: list[float] = options.numbers("--ratios", ratios, float)
    runs = plan_sweep(
        experiment,
        method,
        values,
        [seed],
        folder,
        **options.settings(training, jobs),
    )
    _run(runs, jobs, quiet, on_ray=ray)

    from rlsprune.app.experiments.figures import draw_sweep
    from rlsprune.app.report import write_report
    from rlsprune.app.run.folder import RunFolder

    curves = {
        f"{100 * ratio:g} %": RunFolder(run.folder).read_lines("metrics")
        for ratio, run in zip(values, runs, strict=True)
    }
    draw_sweep(curves, f"{find_experiment(experiment).title}, {method}", folder / "sweep.png")
    write_report([run.folder for run in runs], folder / "report.html")
    say(f"Written to {folder / 'sweep.png'} and report.html")


def _out(out: Path | None, name: str) -> Path:
    folder = out or Path("runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _methods(text: str) -> list[str]:
    methods = [part.strip() for part in text.split(",")]
    for method in methods:
        if method not in COMPARED:
            raise ValueError(f"--methods {method} is not valid: choose among {', '.join(COMPARED)}")
    return methods


def _finished(runs: Sequence[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Returns the finished runs with their own settings, because the experiment's defaults may have changed since."""
    from rlsprune.app.run.folder import RunFolder

    found = []
    for run in runs:
        source = RunFolder(run.folder)
        if not source.finished:
            continue
        config = RunConfig.from_dict(source.read_json("config"))
        if any(getattr(config, name) != getattr(run.config, name) for name in _IDENTITY):
            raise ValueError(
                f"{run.folder} holds another run: {', '.join(config.differences(run.config))}; give another --out"
            )
        if differences := config.differences(run.config):
            say(f"{run.folder.name} was run with {', '.join(differences)}", err=True)
        found.append(replace(run, config=config))
    if not found:
        raise ValueError(f"there is no finished run in {folder}: leave out --finished to run them")
    return found


def _run(runs: Sequence[PlannedRun], jobs: int, quiet: bool, on_ray: bool = False) -> None:
    from rich.console import Console

    if started_by_torchrun():
        raise ValueError("torchrun is for `run`, `fit` and `pareto`: use --jobs for several runs at a time")
    from rlsprune.app.cli.terminal import describe
    from rlsprune.app.experiments.jobs import run_all

    console = Console(highlight=False, soft_wrap=True, quiet=quiet, markup=False, emoji=False)
    done = 0

    def report(run: PlannedRun, summary: dict[str, Any], before: bool) -> None:
        nonlocal done
        done += 1
        note = " (finished before)" if before else ""
        console.print(f"{done}/{len(runs)} {run.folder.name}{note}: {describe(summary)}")

    if not on_ray:
        with _status(console, f"{len(runs)} runs, {jobs} at a time"):
            run_all(runs, jobs, report)
        return
    from rlsprune.app.experiments.cluster import RayTasks

    tasks = RayTasks()
    try:
        with _status(console, f"{len(runs)} runs on a Ray cluster"):
            run_all(runs, tasks.slots, report, tasks)
    finally:
        tasks.close()


def _status(console: Console, text: str) -> Any:
    from contextlib import nullcontext

    return console.status(text) if console.is_terminal else nullcontext()
