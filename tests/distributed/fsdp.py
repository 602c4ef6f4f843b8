"""Networks divided by ``fully_shard``, and checkpoints by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import rlsprune
from distributed.scenarios import normed, train
from rlsprune.distributed.ranks import DisagreementError
from rlsprune.graph import Group
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
        save_checkpoint(folder / "divided", model, optimizer)
        twin = divided()
        resumed = rlsprune.RLS(twin, lr=0.1, rank=4)
        load_checkpoint(folder / "divided", twin, resumed)
        train(model, optimizer, (20,), range(10, 13))
        train(twin, resumed, (20,), range(10, 13))
        result["went on"] = whole(dict(model.named_parameters()))
        result["resumed"] = whole(dict(twin.named_parameters()))
    return result


OPTIMIZERS: dict[str, Any] = {
    "RLS": lambda model: rlsprune.RLS(model, lr=0.3, rank=4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
}


def pruned_run(folder: Path, name: str, criterion: str = "obs", patience: int | None = None) -> dict[str, Any]:
    """Trains a divided network, or alone a whole one, and prunes it twice on the way.

    With patience, it is saved then, and both it and one that is loaded are rolled back and trained on.
    """
    model = divided() if dist.is_initialized() else normed()
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[name](model)
    pruner = rlsprune.Pruner(
        model, optimizer, torch.rand(2, 20), ratio=0.3, warmup_epochs=0, criterion=criterion, patience=patience
    )
    events = []
    for number in range(2):
        train(model, optimizer, (20,), range(10 * number, 10 * number + 10))
        assert pruner.preview() is not None  # leaves no trace
        events.append(pruner.step(2.0 - number))
    train(model, optimizer, (20,), range(20, 25))
    assert all(own is other for own, other in zip(parameters, model.parameters(), strict=True))
    result: dict[str, Any] = {
        "removed": [event.removed for event in events],
        "params": [(event.params_before, event.params_after, event.flops_after) for event in events],
        "weights": whole(dict(model.named_parameters())),
        "state": [whole(_tensors(optimizer.state[p])) for p in parameters],
        "local": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters),
    }
    if patience is not None and dist.is_initialized():
        save_checkpoint(folder / "twice", model, optimizer, pruner)
        pruner.save(folder / "twice.safetensors")
        drawn = torch.rand(3)
        result["loaded"] = loaded_divided(folder, name, divided(), patience)
        assert torch.equal(result["loaded"].pop("drawn"), drawn)
    if patience is not None:
        pruner.step(9.0)
        result["rolled back"] = whole(dict(model.named_parameters()))
        result["kinds"] = [event.kind for event in pruner.history]
        train(model, optimizer, (20,), range(25, 27))
        result["went on"] = whole(dict(model.named_parameters()))
    return result


def loaded_divided(folder: Path, name: str, model: nn.Module, patience: int) -> dict[str, Any]:
    """Goes on from the checkpoint of a divided network, with one that is divided or whole."""
    optimizer = OPTIMIZERS[name](model)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 20), ratio=0.3, warmup_epochs=0, patience=patience)
    load_checkpoint(folder / "twice", model, optimizer, pruner)
    drawn = torch.rand(3)
    weights = whole(dict(model.named_parameters()))
    pruner.step(9.0)
    train(model, optimizer, (20,), range(25, 27))
    return {"drawn": drawn, "weights": weights, "went on": whole(dict(model.named_parameters()))}


def _tensors(entries: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entries.items() if isinstance(value, Tensor)}


PRUNED: dict[str, tuple[Any, ...]] = {
    "RLS": ("RLS",),
    "AdamW": ("AdamW",),
    "l1": ("AdamW", "l1"),
    "roll-back": ("RLS", "obs", 1),
}


DEPTH, WIDTH = 8, 24


def gathered_run() -> float:
    """An event on a deep network: what was gathered of it at any one time, in weights of a layer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = OPTIMIZERS["AdamW"](model)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, WIDTH), ratio=0.2, patience=None)
    for _ in range(2):
        model(torch.rand(16, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    made: list[tuple[StorageWeakRef, int]] = []  # views keep what they are views of
    most, full_tensor = [0], DTensor.full_tensor

    def watched(self: DTensor, **options: Any) -> Tensor:
        result = full_tensor(self, **options)
        made.append((StorageWeakRef(result.untyped_storage()), result.numel()))
        most.append(sum(size for storage, size in made if not storage.expired()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", watched)
        assert pruner.prune() is not None
    return max(most) / WIDTH**2


def undone_run() -> dict[str, Any]:
    """An event that ranks disagree on when they come to the last layer: what is left of it, and the next one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = OPTIMIZERS["AdamW"](model)
    agreed, scored = False, []

    def scores(group: Group) -> list[Tensor]:
        scored.append((group.name, group.size, model[0].weight.shape[0]))
        ranked = torch.arange(group.size, dtype=torch.float64)
        return [-ranked if group.name == "2" and dist.get_rank() and not agreed else ranked]

    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 20), ratio=0.3, criterion=scores, patience=None)
    train(model, optimizer, (20,), range(3))

    def present() -> dict[str, Any]:
        return {
            "weights": whole(dict(model.named_parameters())),
            "state": [whole(_tensors(optimizer.state[p])) for p in model.parameters()],
        }

    before = present()
    with pytest.raises(DisagreementError) as error:
        pruner.prune()
    result = {"before": before, "after": present(), "said": str(error.value), "scored": list(scored)}
    agreed = True
    train(model, optimizer, (20,), range(3, 5))
    event = pruner.prune()
    assert event is not None
    return {**result, "removed": event.removed}


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
