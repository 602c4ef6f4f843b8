"""`rlsprune plan`: estimates the costs of a network on several processes, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsprune.app.cli import options
from rlsprune.app.experiments.registry import EXPERIMENTS

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from rlsprune.app.costs.estimate import CostPlan

__all__ = ["EXAMPLES", "plan"]

EXAMPLES = """Examples: `rlsprune plan vgg16 --world-size 8 --batch 256` ·
`rlsprune plan my_module:build_model --rank 8 --memory 16` ·
`rlsprune plan decoder_8b --world-size 64 --sharded --gflops 15000 --gbytes 1200 --link 25`"""

_BUILT_IN = ("vgg16", "resnet50", "vit_large", "decoder_8b")

_WHOLE_EVENTS = (
    "The estimated event refits layer by layer. With batch norm, a single process refits the network as a whole, which "
    "also takes a copy of the network, up to 512 kept inputs (128 MB at most), the activations of a batch of them, and "
    "the time of about nine forward passes over 1,024 inputs."
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(_BUILT_IN)}, an experiment, or module:function of your own.",
            show_default=False,
            autocompletion=options.completing((*_BUILT_IN, *EXPERIMENTS)),
        ),
    ],
    world_size: Annotated[int, typer.Option("--world-size", help="The number of processes.")] = 1,
    batch: Annotated[int, typer.Option("--batch", help="Inputs per step, over all processes.")] = 128,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Divide weights, gradients and velocities by fully_shard, block by block.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", help="The rank of P in factors; 0 for P whole.")] = 16,
    memory: Annotated[float, typer.Option("--memory", help="The memory of a process, in GiB.")] = 16.0,
    gflops: Annotated[
        float | None,
        typer.Option("--gflops", help="The speed of a matrix product, in GFLOPS. Default: this machine's, measured."),
    ] = None,
    gbytes: Annotated[
        float | None, typer.Option("--gbytes", help="The memory bandwidth, in GB/s. Default: this machine's, measured.")
    ] = None,
    link: Annotated[
        float, typer.Option("--link", help="The speed of the link between processes, in GB/s; 12.5 is 100 Gbit/s.")
    ] = 12.5,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Estimate what a step, an event and a shrink cost each process in memory, time and bytes, and what fits."""
    from rich.console import Console

    from rlsprune.app.costs.estimate import Machine, make_plan, measure
    from rlsprune.model.arguments import check_argument
    from rlsprune.prune.original import has_batch_norms

    check_argument("link", link, link > 0, "above 0")
    where = device or "cpu"
    here = Machine(0, 0) if gflops and gbytes else measure(where)
    machine = Machine(gflops or here.gflops, gbytes or here.gbytes, link)
    network, example = _build(model)
    flops = None if example is None else _flops(network, example)
    made = make_plan(network, world_size, batch, machine, rank or None, sharded=sharded, flops=flops)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
        return
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    for table in (_table(model, made), _work(made)):
        console.print(table)
    notes = [_WHOLE_EVENTS] if world_size == 1 and has_batch_norms(network) else []
    for line in [*_summary(made), *notes, _verdict(made, memory * 2**30)]:
        console.print(line)


def _build(name: str) -> tuple[nn.Module, Tensor | None]:
    """Builds the network without memory for its weights, and an input if its shape is known."""
    import torch

    from rlsprune.app.experiments.registry import EXPERIMENTS
    from rlsprune.app.fit.model import find_builder
    from rlsprune.app.models import decoder, imagenet

    with torch.device("meta"):
        if name == "decoder_8b":
            return decoder.decoder_8b(), torch.zeros(1, decoder.CONTEXT, dtype=torch.long)
        if name in _BUILT_IN:
            return getattr(imagenet, name)(), torch.zeros(1, 3, 224, 224)
        if name in EXPERIMENTS:
            return EXPERIMENTS[name].build(), None
        if ":" not in name:
            known = ", ".join([*_BUILT_IN, *EXPERIMENTS])
            raise ValueError(f"there is no network {name!r}: give one of {known}, or module:function of your own")
        return find_builder(name, str(Path.cwd()))(), None


def _flops(network: nn.Module, example: Tensor) -> int:
    import torch

    from rlsprune.model.counts import count

    with torch.device("meta"):
        return count(network, example)[1]


def _work(made: CostPlan) -> Table:
    from rich.table import Table

    table = Table(title="each process")
    for column in ("", "memory", "computing", "sent", "on the link"):
        table.add_column(column, justify="left" if not column else "right")
    for work in made.work():
        link = _seconds(1e-9 * work.sent / made.machine.link)
        table.add_row(work.name, _bytes(work.memory), _seconds(work.seconds), _bytes(work.sent), link)
    return table


def _table(name: str, made: CostPlan) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}: {made.world_size} processes, batches of {made.batch}")
    for column in ("layer", "inputs", "outputs", "P", "velocity", "step"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in made.layers:
        table.add_row(
            layer.name,
            str(layer.inputs),
            str(layer.outputs),
            _bytes(layer.inverse_bytes),
            _bytes(layer.velocity_bytes),
            _seconds(layer.seconds),
        )
    return table


def _summary(made: CostPlan) -> list[str]:
    lines = [
        f"A rank computes {made.machine.gflops:,.0f} GFLOPS, moves {made.machine.gbytes:,.1f} GB/s and sends "
        f"{made.machine.link:,.1f} GB/s.",
        f"Weights {_bytes(made.parameter_bytes)}. State {_bytes(made.state_bytes)} and {_seconds(made.seconds)} per "
        "step beyond momentum SGD, on every process.",
    ]
    if made.sharded:
        lines.append(
            f"P, {_bytes(made.inverse_bytes)} on every process, exceeds a process's part of weights, gradients and "
            f"velocities from {made.ranks_to_outgrow:,} processes on."
        )
    return lines


def _verdict(made: CostPlan, memory: float) -> str:
    need = f"Weights, gradients and state take {_bytes(made.training_bytes)} of {_bytes(memory)} (without activations)"
    return f"{need}: it fits." if made.training_bytes <= memory else f"{need}: it does not fit."


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def _seconds(seconds: float) -> str:
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
