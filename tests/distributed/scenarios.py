"""What the ranks of a test do; alone, or each with its share of every batch."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rlsprune
from distributed import launch
from distributed.runs import OPTIONS
from networks import SHAPES, cnn, fnn, target
from rlsprune.app.cli.main import main
from rlsprune.distributed.ranks import DisagreementError, RankLostError

BATCH, STEPS, PRUNES = 24, 50, (20, 35)


def share(batch: Tensor) -> Tensor:
    """This rank's part of a batch."""
    if not dist.is_initialized():
        return batch
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], steps: range) -> float:
    """Steps of a training, each with a batch that depends on its number alone."""
    loss = torch.zeros(())
    for step in steps:
        whole = torch.rand(BATCH, *shape, generator=torch.Generator().manual_seed(step))
        inputs = share(whole).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(inputs) - target(inputs)).square().sum() / (2 * len(inputs))
        loss.backward()
        optimizer.step()
    return loss.item()


def held_out_loss(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Of this rank's part of the images; the model itself is called, without the wrapper."""
    inputs = share(torch.rand(BATCH, *shape, generator=torch.Generator().manual_seed(99)))
    return (model(inputs) - target(inputs)).square().sum() / (2 * len(inputs))


def train_and_prune(make: Any, *, rank: int | None = 16, spread: bool = False, **options: Any) -> dict[str, Any]:
    """50 steps and two prunes."""
    model = make()
    call = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = rlsprune.RLS(call, lr=0.3, rank=rank)
    pruner = rlsprune.Pruner(call, optimizer, torch.rand(2, *SHAPES[make]), ratio=0.3, criterion="obs", **options)
    if spread:
        pruner.held_out_loss = lambda: held_out_loss(model, SHAPES[make])
    done, events = 0, []
    for end in (*PRUNES, STEPS):
        train(call, optimizer, SHAPES[make], range(done, end))
        done = end
        if end != STEPS:
            if make is normed:
                assert pruner.preview() is not None  # must leave no trace, in the wrapper neither
            events.append(pruner.prune())
    result = {
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "removed": [event.removed for event in events],
        "inverse": {name: optimizer.inverse(name) for name in optimizer._recorders},
        "state": optimizer.state_dict(),
    }
    result = copy.deepcopy(result)  # the training goes on
    train(call, optimizer, SHAPES[make], range(STEPS, STEPS + 3))
    result["went on"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(result["weights"][name])
    optimizer.close()
    resumed = rlsprune.RLS(call, lr=0.3, rank=rank)
    resumed.load_state_dict(result["state"])
    train(call, resumed, SHAPES[make], range(STEPS, STEPS + 3))
    result["resumed"] = {name: p.detach() for name, p in model.named_parameters()}
    return result


def normed() -> nn.Sequential:
    """With parameters that momentum SGD trains."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


SHAPES[normed] = (20,)
CASES: dict[str, dict[str, Any]] = {
    "fnn": {"make": normed},
    "cnn": {"make": cnn},
    "training P": {"make": fnn, "statistics": "training", "rank": None},
    "training P in factors": {"make": fnn, "statistics": "training", "rank": 4},
    "spread": {"make": cnn, "spread": True, "compensate": False},  # else most cuts cost so little that they are level
}


def equal_runs(folder: Path) -> dict[str, Any]:
    """Every case, and where there are ranks what they alone can do."""
    plain = {name: train_and_prune(**case) for name, case in CASES.items()}
    if not dist.is_initialized():
        return {"plain": plain}
    from distributed import fsdp

    result = {
        "plain": plain,
        "guards": guards(),
        "fsdp": fsdp.divided_run(folder),
        "pruned": {name: fsdp.pruned_run(folder, *case) for name, case in fsdp.PRUNED.items()},
        "gathered": fsdp.gathered_run(),
        "undone": fsdp.undone_run(),
        "messages": messages(),
        "checkpoint": fsdp.checkpointed_run(folder),
        "exit code": main([*OPTIONS, "--epochs", "3", "--threads", "1", "--out", str(folder / "run")]),
        "folder": str(folder),
    }
    model = fnn()
    optimizer = rlsprune.RLS(model)
    if dist.get_rank() > 0:
        torch.save(result, folder / f"rank{dist.get_rank()}.pt")
        os._exit(0)
    with pytest.raises(RankLostError) as lost:
        train(model, optimizer, (20,), range(3))
    return result | {"lost": str(lost.value)}


def messages() -> list[str]:
    """What a step of the optimizer says to other ranks; the gradients are averaged in the backward."""
    model = DistributedDataParallel(normed())
    optimizer = rlsprune.RLS(model, lr=0.3)
    train(model, optimizer, (20,), range(2))
    (model(share(torch.rand(BATCH, 20))) ** 2).sum().backward()
    sent: list[str] = []
    with launch.watched(sent.append):
        optimizer.step()
    return sent


def guards() -> dict[str, str]:
    """What is said when ranks differ."""
    rank = dist.get_rank()
    said = {}

    def refused(what: str, attempt: Any) -> None:
        try:
            attempt()
        except DisagreementError as error:
            said[what] = str(error)

    refused("settings", lambda: rlsprune.RLS(fnn(), lr=0.1 + rank))
    refused("shapes", lambda: rlsprune.RLS(nn.Linear(3 + rank, 2)))

    model = fnn()
    optimizer = rlsprune.RLS(model, lr=0.3)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 20), ratio=0.3)
    train(DistributedDataParallel(model), optimizer, (20,), range(3))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        optimizer.inverse("2")[0, 0] += rank * 1e-6
    refused("P", pruner.prune)
    optimizer.reset("2")
    pruner._operation.settings = pruner._operation.settings.__class__(
        **{**vars(pruner._operation.settings), "criterion": lambda group: [torch.arange(group.size) * (1.0 - 2 * rank)]}
    )
    refused("chosen", pruner.prune)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return said


def lose_a_rank(folder: Path, end: str) -> None:
    """Rank 1 leaves after three steps, and rank 0 goes on."""
    model = fnn()
    optimizer = rlsprune.RLS(model, lr=0.3)
    for step in range(100):
        if dist.get_rank() == 1 and step == 3:
            if end == "dies":
                os._exit(9)
            time.sleep(600)
        train(model, optimizer, (20,), range(step, step + 1))
