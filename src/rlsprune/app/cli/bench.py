"""`rlsprune bench`: measures the costs of RLS and of a prune on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsprune.app.cli import options
from rlsprune.app.experiments.registry import EXPERIMENTS

if TYPE_CHECKING:
    from torch import nn

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = """Examples: `rlsprune bench` · `rlsprune bench cifar10-vgg --batch 32` ·
`rlsprune bench my_module:build_model --shape 3,224,224 --device cuda`"""


def bench(
    model: Annotated[
        str,
        typer.Argument(
            help="An experiment, or module:function of your own.", autocompletion=options.completing(tuple(EXPERIMENTS))
        ),
    ] = "mnist-fnn",
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="The shape of one input, such as 3,224,224. Default: the experiment's."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=2, help="Inputs per step.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="The number of measurements of each step.")] = 5,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure training steps and a prune, as ratios to a step of momentum SGD taken in the same round."""
    import torch

    from rlsprune.app.costs.measure import measure_costs

    machine = options.resolve(device, threads, None, False)
    torch.set_num_threads(machine["threads"])
    network, size = _network(model, shape)
    inputs = torch.rand(batch, *size, device=machine["device"])
    costs = measure_costs(network.to(machine["device"]), inputs, rounds)
    if as_json:
        typer.echo(json.dumps([asdict(cost) for cost in costs]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}, batches of {batch}, {machine['device']}, threads: {machine['threads']}")
    table.add_column("")
    for column in ("ratio", "quartiles", "ms", "state MiB"):
        table.add_column(column, justify="right")
    for cost in costs:
        state = "" if cost.state_bytes is None else f"{cost.state_bytes / 2**20:.1f}"
        quartiles = "{:.2f}–{:.2f}".format(*cost.quartiles)
        table.add_row(cost.name, f"{cost.ratio:.2f}", quartiles, f"{cost.milliseconds:.1f}", state)
    Console(highlight=False, markup=False, emoji=False).print(table)


def _network(name: str, shape: str | None) -> tuple[nn.Module, list[int]]:
    """Returns the network, and the shape of one input."""
    from rlsprune.app.experiments.registry import EXPERIMENTS
    from rlsprune.app.fit.model import find_builder

    size = None if shape is None else options.numbers("--shape", shape, int)
    if name in EXPERIMENTS:
        return EXPERIMENTS[name].build(), size or list(EXPERIMENTS[name].input_shape)
    if ":" not in name:
        raise ValueError(
            f"there is no experiment {name!r}: give one of {', '.join(EXPERIMENTS)}, or module:function of your own"
        )
    if size is None:
        raise ValueError(f"{name} needs the shape of one input, for example: --shape 3,224,224")
    return find_builder(name, str(Path.cwd()))(), size
