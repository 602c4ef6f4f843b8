"""`rlsprune pareto`: shrinks a finished run's network and shows what each size costs in accuracy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsprune.app.cli import folders, options
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.config.metrics import Metric, metric_of
from rlsprune.distributed.torchrun import leads
from rlsprune.model.arguments import printable

if TYPE_CHECKING:
    from rlsprune.app.run.folder import RunFolder

__all__ = ["EXAMPLES", "pareto"]

EXAMPLES = """Examples: `rlsprune pareto runs/digits-fnn-none-seed0` ·
`rlsprune pareto runs/mnist-fnn-none-seed0 --max-drop 0.3 --ratio 0.1` ·
`torchrun --nproc-per-node 2 -m rlsprune pareto runs/mnist-fnn-none-seed0` (each process with its share of the data)"""


def pareto(
    run: Annotated[
        Path, typer.Argument(help="The folder of a finished run of `rlsprune run` or `fit`.", show_default=False)
    ],
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", help="Stop when the held-out score stays this many points below the run's. Default: 1."
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Stop at this share of the parameters, at any accuracy.")
    ] = None,
    ratio: Annotated[float, typer.Option("--ratio", help="ξ: the share of what is left that a round removes.")] = 0.2,
    recovery_epochs: Annotated[
        int, typer.Option("--recovery-epochs", help="The most epochs of training after each round.")
    ] = 2,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate of RLS in these epochs.")] = 0.1,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Shrink a finished run's network step by step, and draw accuracy against size."""
    from rlsprune.app.cli.terminal import status
    from rlsprune.app.experiments.pareto import FrontSettings, shrink_run
    from rlsprune.app.run.folder import RunFolder

    source = RunFolder(run)
    if not source.finished:
        of_fit = source.started and "import_from" in source.read_json("config")
        command = f"rlsprune {'fit' if of_fit else 'run'} --resume"
        raise ValueError(f"{run} holds no finished run: give the folder of one, or finish it with `{command}`")
    config = _config(run, source, device, data_dir)
    metric = metric_of(source.read_summary())
    folder = out or run / "pareto"
    settings = FrontSettings(
        max_drop=1.0 if max_drop is None and target is None else max_drop,
        target=target,
        ratio=ratio,
        recovery_epochs=recovery_epochs,
        lr=lr,
    )
    full: dict[str, Any] = {}
    try:
        with status(quiet or not leads()) as (say, progress):

            def show(point: dict[str, Any]) -> None:
                if not full:
                    full.update(point)
                    say(f"params %  FLOPs %  {'test':>10}  {'held-out':>10}  right after  epochs  seconds")
                say(_row(point, full, metric))

            result = shrink_run(config, source, folder, settings, on_point=show, on_progress=progress)
    except (KeyboardInterrupt, FloatingPointError):
        if (folder / "pareto.json").exists():
            typer.echo(printable(f"Stopped. The front so far is in {folder}"), err=True)
        raise
    if not leads():
        return
    chosen = result["front"][result["chosen"]]
    share = 100 * chosen["params"] / full["params"]
    typer.echo(f"Chosen: {share:.1f} % of the parameters, {metric.label} {metric.text(chosen[metric.name])}")
    if config.method != "shrink":
        typer.echo("The run may have trained on the held-out examples: compare the networks by their test scores")
    typer.echo(printable(f"Written to {folder}: model.safetensors, pareto.png and pareto.json"))


def _config(run: Path, source: RunFolder, device: str | None, data_dir: Path | None) -> RunConfig | FitConfig:
    """Reads the configuration of a run of either command, with a device that this machine has."""
    values = source.read_json("config")
    if "import_from" not in values:
        return folders.read_config(run, "", device, data_dir)
    if data_dir is not None:
        raise ValueError("--data-dir is for the data sets of experiments: a run of `rlsprune fit` knows its own data")
    config = FitConfig.from_dict(values)
    return replace(config, device=options.usable_device(device or config.device))


def _row(point: dict[str, Any], full: dict[str, Any], metric: Metric) -> str:
    params, flops = (100 * point[what] / full[what] for what in ("params", "flops"))
    test, held_out, pruned = (metric.text(point[name]) for name in (metric.name, "score", "score_pruned"))
    return (
        f"{params:8.1f} {flops:8.1f} {test:>11} {held_out:>11} {pruned:>12} {point['epochs']:7} {point['seconds']:8.0f}"
    )
