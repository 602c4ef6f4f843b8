"""Networks divided by ``fully_shard``, and checkpoints by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rlsprune
from distributed.scenarios import normed, train
from rlsprune.io.checkpoint import load_checkpoint, save_checkpoint


def divided() -> nn.Module:
    model = normed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)  # one layer by itself, which is divided again after its forward
    fully_shard(model, mesh=mesh)
    return model


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in tensors.items()
    }


def divided_run(folder: Path) -> dict[str, Any]:
    """Trains a divided network, or alone a whole one, and loads its checkpoint into another."""
    model = divided() if dist.is_initialized() else normed()
    optimizer = rlsprune.RLS(model, lr=0.3, rank=4)
    train(model, optimizer, (20,), range(10))
    result: dict[str, Any] = {
        "weights": whole(dict(model.named_parameters())),
        "inverse": optimizer.inverse("2").clone(),
        "velocity": optimizer.memory_usage()["velocity"],
    }
    if dist.is_initialized():
        try:
            rlsprune.Pruner(model, optimizer, torch.rand(2, 20))
        except ValueError as error:
            result["refused"] = str(error)
        save_checkpoint(folder / "divided", model, optimizer)
        twin = divided()
        resumed = rlsprune.RLS(twin, lr=0.1, rank=4)
        load_checkpoint(folder / "divided", twin, resumed)
        train(model, optimizer, (20,), range(10, 13))
        train(twin, resumed, (20,), range(10, 13))
        result["went on"] = whole(dict(model.named_parameters()))
        result["resumed"] = whole(dict(twin.named_parameters()))
    return result


def pruned() -> tuple[nn.Module, rlsprune.RLS, rlsprune.Pruner]:
    """A network to be trained and pruned."""
    model = normed()
    optimizer = rlsprune.RLS(model, lr=0.3, rank=4)
    return model, optimizer, rlsprune.Pruner(model, optimizer, torch.rand(2, 20), ratio=0.3, warmup_epochs=0)


def checkpointed_run(folder: Path) -> dict[str, Any]:
    """Trains and prunes, and leaves a checkpoint that anyone can load."""
    model, optimizer, pruner = pruned()
    network = DistributedDataParallel(model)
    loss = train(network, optimizer, (20,), range(5))
    event = pruner.step(loss)
    assert event is not None
    train(DistributedDataParallel(model), optimizer, (20,), range(5, 8))
    save_checkpoint(folder / "pruned", model, optimizer, pruner)
    return loaded_run(folder) | {"saved": state_of(model, optimizer)}


def loaded_run(folder: Path) -> dict[str, Any]:
    """What is loaded, on this number of ranks."""
    model, optimizer, pruner = pruned()
    load_checkpoint(folder / "pruned", model, optimizer, pruner)
    return {"loaded": state_of(model, optimizer), "history": [event.removed for event in pruner.history]}


def state_of(model: nn.Module, optimizer: rlsprune.RLS) -> dict[str, Any]:
    """Copies of the weights and of the optimizer's state."""
    return {"weights": whole(dict(model.named_parameters())), "state": copy.deepcopy(optimizer.state_dict()["state"])}
