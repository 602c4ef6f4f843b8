"""Networks that are shrunk alone, or by ranks that each have a share of the batches."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rlsprune
from distributed import launch
from rlsprune.app.cli.main import main
from rlsprune.prune import choice
from rlsprune.reconstruction import calibration, leastsquares
from zoo import ZOO

BATCHES = 12  # divides by two and by three


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def in_turn(batches: list[Any]) -> list[Any]:
    """This rank's batches: every so many-th."""
    rank, size = rank_and_size()
    return batches[rank::size]


def parts(batches: list[Tensor]) -> list[Tensor]:
    """This rank's part of each batch."""
    rank, size = rank_and_size()
    return [batch.chunk(size)[rank].contiguous() for batch in batches]


def random_batches(shape: tuple[int, ...], size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *shape, generator=generator) for _ in range(BATCHES)]


def at_once(name: str, size: int, **options: Any) -> Callable[[], dict[str, Any]]:
    """A network of the zoo, in closed form."""

    def run() -> dict[str, Any]:
        specimen = ZOO[name]
        model = specimen.model().eval()
        batches = random_batches(specimen.shape[1:], size)
        probe = random_batches(specimen.shape[1:], size, seed=7)[0]
        return shrunk(model, in_turn(batches), probe, **{"target": {"params": 0.5}, **options})

    return run


def shrunk(model: nn.Module, batches: Any, probe: Any, **options: Any) -> dict[str, Any]:
    result = rlsprune.shrink(model, batches, **options)
    with torch.no_grad():
        outputs = model(**probe) if isinstance(probe, dict) else model(probe)
    return {
        "outputs": outputs,
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "front": [(point.params, point.flops, point.epochs, point.within) for point in result.front],
        "scores": [(point.score, point.score_pruned) for point in result.front],
    }


def labelled() -> dict[str, Any]:
    """A search for the smallest network within a drop of the accuracy, which all batches of all ranks tell."""
    model = ZOO["fnn"].model().eval()
    with torch.no_grad():
        pairs = [(x, model(x).argmax(1)) for x in random_batches((16,), 40)]
        judges = [(x, model(x).argmax(1)) for x in random_batches((16,), 30, seed=1)]
    return shrunk(model, in_turn(pairs), judges[0][0], max_drop=6.0, valid=in_turn(judges))


def with_recovery() -> dict[str, Any]:
    """Rounds with training between: every rank has a part of each batch, as in training; wrapped as there."""
    model = ZOO["fnn"].model().eval()
    model[5].p = 0.0  # ranks would drop others
    call = DistributedDataParallel(model) if dist.is_initialized() else model
    result = shrunk(
        call,
        parts(random_batches((16,), 48)),
        random_batches((16,), 48, seed=7)[0],
        target={"params": 0.4},
        recovery_epochs=1,
        ratio=0.4,
        optimizer=lambda network: rlsprune.RLS(network, lr=0.05),
    )
    call(torch.randn(6, 16)).square().sum().backward()  # the wrapper knows the new shapes
    return {**result, "state": {name.removeprefix("module."): value for name, value in result["state"].items()}}


class Tokens(nn.Module):
    """Sequences of different lengths, filled up; more than are drawn of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(50, 12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.out(torch.relu(self.layer(x))))
        return self.head((x * attention_mask.unsqueeze(-1)).sum(1))


def padded() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tokens().eval()
    lengths = torch.randint(3, 120, (BATCHES, 40))
    masks = torch.arange(120) < lengths.unsqueeze(-1)
    batches = [{"ids": torch.randint(50, (40, 120)), "attention_mask": mask.long()} for mask in masks]
    return shrunk(model, in_turn(batches), batches[0], target={"params": 0.8})


def in_rows() -> dict[str, Any]:
    """Layers with so many inputs that they are solved in the space of rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (choice, leastsquares):
            patch.setattr(module, "MOST_INPUTS", 11)
        return at_once("fnn", 24)()


def with_little_room() -> dict[str, Any]:
    """The first layers see one piece of the inputs at a time: of one rank, and the other has nothing to add."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_LIVE_BYTES", 2**18)
        return at_once("resnet-basic", 24)()


def by_time() -> dict[str, Any]:
    """Rank 0 measures for all."""
    result = at_once("fnn", 24, target={"latency": 0.95})()
    return {**result, "scores": [], "front": [], "state": result["state"] if dist.is_initialized() else {}}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "residual, sampled": at_once("resnet-basic", 24),
    "grouped": at_once("resnext", 8),
    "heads": at_once("bert", 12, target={"params": 0.7}),
    "thinned": at_once("fnn", 24, calibration=100),
    "labels": labelled,
    "recovery": with_recovery,
    "padded": padded,
    "in rows": in_rows,
    "little room": with_little_room,
}


def all_cases(folder: Path) -> dict[str, Any]:
    results = {name: case() for name, case in CASES.items()}
    if dist.is_initialized():
        results["by time"] = by_time()
        results["refusals"] = refusals()
        results["messages"] = messages()
    return results


def messages() -> list[tuple[str, list[str]]]:
    """What a rank sends while each layer is looked at and refitted."""
    sent: list[tuple[str, list[str]]] = [("", [])]
    with launch.watched(lambda name: sent[-1][1].append(name)):
        at_once("resnet-basic", 24, on_progress=lambda stage, *_: sent.append((stage, [])))()
    return sent


RUN = ["run", "digits-fnn", "--method", "none", "--optimizer", "sgd", "--train-images", "600", "--test-images", "200"]


def pareto(run: Path, out: Path) -> list[str]:
    return ["pareto", str(run), "--target", "0.3", "--ratio", "0.5", "--recovery-epochs", "1", "--out", str(out)]


def commands(folder: Path) -> dict[str, Any]:
    """A finished run, and its front."""
    run = [*RUN, "--epochs", "2", "--batch-size", "60", "--threads", "1", "--quiet", "--out", str(folder / "run")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        codes = [main(run), main(pareto(folder / "run", folder / "front"))]
    return {"codes": codes, "said": said.getvalue()}


def refusals() -> dict[str, str]:
    """What is said of ranks that do not fit together."""
    rank, _ = rank_and_size()
    said = {}
    model = ZOO["fnn"].model(seed=rank).eval()
    batches = random_batches((16,), 8)
    for what, attempt in {
        "weights": lambda: rlsprune.shrink(model, batches, target={"params": 0.5}),
        "no batch": lambda: rlsprune.shrink(ZOO["fnn"].model(), batches if rank else [], target={"params": 0.5}),
    }.items():
        with pytest.raises((ValueError, RuntimeError)) as error:
            attempt()
        said[what] = str(error.value)
    alone = dist.new_group([0]), dist.new_group([1])
    own = rlsprune.shrink(model, batches, target={"params": 0.5}, process_group=alone[rank]) if rank < 2 else None
    said["apart"] = str(own is None or own.chosen.params < own.front[0].params)
    return said
