"""`rlsprune pareto`: how small a finished run's network can get, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlsprune.app.cli import folders, options
from rlsprune.model.arguments import printable

__all__ = ["EXAMPLES", "pareto"]

EXAMPLES = """Examples: `rlsprune pareto runs/digits-fnn-none-seed0` ·
`rlsprune pareto runs/mnist-fnn-none-seed0 --max-drop 0.3 --ratio 0.1`"""

_HEAD = "params %  FLOPs %  accuracy %  held-out %  right after  epochs  seconds"


def pareto(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run of `rlsprune run`.", show_default=False)],
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", help="Stop when held-out accuracy stays so many points below the run's. Default: 1."
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Stop at this share of the parameters, whatever the accuracy.")
    ] = None,
    ratio: Annotated[float, typer.Option("--ratio", help="ξ: the share of the channels that goes in a round.")] = 0.2,
    recovery_epochs: Annotated[int, typer.Option("--recovery-epochs", help="Training after each round, at most.")] = 2,
    lr: Annotated[float, typer.Option("--lr", help="η of the RLS that recovers.")] = 0.1,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Make a finished run's network smaller and smaller, and draw accuracy against size."""
    from rlsprune.app.cli.terminal import status
    from rlsprune.app.experiments.pareto import FrontSettings, shrink_run
    from rlsprune.app.run.folder import RunFolder

    source = RunFolder(run)
    if not source.finished:
        raise ValueError(
            f"{run} holds no finished run: give the folder of one, or finish it with `rlsprune run --resume`"
        )
    config = folders.read_config(run, "give the folder of one of `rlsprune run`", device, data_dir)
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
        with status(quiet) as (say, progress):

            def show(point: dict[str, Any]) -> None:
                if not full:
                    full.update(point)
                    say(_HEAD)
                say(_row(point, full))

            result = shrink_run(config, source, folder, settings, on_point=show, on_progress=progress)
    except (KeyboardInterrupt, FloatingPointError):
        if (folder / "pareto.json").exists():
            typer.echo(printable(f"Stopped. What there is so far is in {folder}"), err=True)
        raise
    chosen = result["front"][result["chosen"]]
    share = 100 * chosen["params"] / full["params"]
    typer.echo(f"Chosen: {share:.1f} % of the parameters, accuracy {chosen['accuracy']:.2f} %")
    typer.echo(printable(f"Written to {folder}: model.safetensors, pareto.png and pareto.json"))


def _row(point: dict[str, Any], full: dict[str, Any]) -> str:
    params, flops = (100 * point[what] / full[what] for what in ("params", "flops"))
    return (
        f"{params:8.1f} {flops:8.1f} {point['accuracy']:12.2f} {point['score']:11.2f} {point['score_pruned']:12.2f} "
        f"{point['epochs']:7} {point['seconds']:8.0f}"
    )
