"""Checkpoints by torch.distributed.checkpoint, in one process: whole or refused, loaded or nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from prune.scenes import plain
from rlsprune.io import checkpoint
from rlsprune.io.atomic import FileError
from rlsprune.io.checkpoint import load_checkpoint, save_checkpoint
from rlsprune.io.state import save_state

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "RLS": rlsprune.RLS,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def made(kind: str = "RLS", width: int = 12) -> tuple[nn.Module, Any, rlsprune.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))
    optimizer = KINDS[kind](model)
    return model, optimizer, rlsprune.Pruner(model, optimizer, torch.rand(2, 8), ratio=0.3, warmup_epochs=0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.rand(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()


def saved(folder: Path, kind: str = "RLS") -> tuple[nn.Module, Any, rlsprune.Pruner]:
    model, optimizer, pruner = made(kind)
    train(model, optimizer, range(5))
    assert pruner.step(1.0) is not None
    train(model, optimizer, range(5, 8))
    save_checkpoint(folder, model, optimizer, pruner)
    return model, optimizer, pruner


def facts(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: rlsprune.Pruner) -> Any:
    """All that a checkpoint holds, comparable bit for bit."""
    return plain([dict(model.state_dict()), optimizer.state_dict(), pruner.state_dict(), str(model)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_numbers_of_one_that_went_on(tmp_path: Path, kind: str) -> None:
    parts = saved(tmp_path, kind)
    train(*parts[:2], range(8, 12))
    resumed = made(kind)
    load_checkpoint(tmp_path, *resumed)
    train(*resumed[:2], range(8, 12))  # dropout's random numbers included
    assert facts(*resumed) == facts(*parts)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "state.safetensors").unlink(), "state.safetensors"),
        (lambda folder: flip(folder / "state.safetensors"), "state.safetensors"),
        (lambda folder: flip(next((folder / "parts").glob("*.distcp"))), "differs from what was written"),
        (lambda folder: (folder / "parts" / ".metadata").unlink(), "differs from what was written"),
        (lambda folder: flip(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it is missing; restore the folder"),
        (lambda folder: rlsprune.save(made()[0], folder / "model.safetensors"), "not the one that was written with"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    saved(tmp_path)
    damage(tmp_path)
    parts = made()
    before = facts(*parts)
    with pytest.raises(FileError, match=message):
        load_checkpoint(tmp_path, *parts)
    assert facts(*parts) == before


def test_one_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = rlsprune.RLS(model)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 8))
    before = facts(model, optimizer, pruner)
    with pytest.raises(FileError, match="build the same model"):
        load_checkpoint(tmp_path, model, optimizer, pruner)
    assert facts(model, optimizer, pruner) == before


def test_an_error_of_the_last_part_undoes_those_before(tmp_path: Path) -> None:
    saved(tmp_path)
    model, optimizer, pruner = made()
    pruner.follow(made()[0])  # the saved one followed no copy
    before = facts(model, optimizer, pruner)
    with pytest.raises(ValueError, match="followed 0 copies"):
        load_checkpoint(tmp_path, model, optimizer, pruner)
    assert facts(model, optimizer, pruner) == before
    train(model, optimizer, range(2))
    assert pruner.step(1.0) is not None, "the pruner knows the network as it is"


def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path, "AdamW")
    for make, message in [
        (rlsprune.RLS, "its optimizer is AdamW, and this one is RLS; make the same optimizer"),
        (lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]), "other groups of parameters"),
        (lambda model: torch.optim.AdamW(model[0].parameters()), "other groups of parameters"),
    ]:
        model = made()[0]
        optimizer: Any = make(model)
        before = plain([dict(model.state_dict()), optimizer.state_dict()])
        with pytest.raises(FileError, match=message):
            load_checkpoint(tmp_path, model, optimizer)
        assert plain([dict(model.state_dict()), optimizer.state_dict()]) == before


def test_an_optimizer_that_trains_more_than_the_model_is_told(tmp_path: Path) -> None:
    model, other = made()[0], nn.Linear(3, 5)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match=r"also trains a parameter of the shape \(5, 3\)"):
        save_checkpoint(tmp_path / "new", model, optimizer)
    assert not (tmp_path / "new").exists()
    saved(tmp_path, "AdamW")
    with pytest.raises(ValueError, match=r"also trains a parameter of the shape \(5, 3\)"):
        load_checkpoint(tmp_path, model, optimizer)


def test_states_of_something_else_are_told(tmp_path: Path) -> None:
    save_state(tmp_path / "state.safetensors", {"epoch": 3})
    with pytest.raises(FileError, match="not the state of a checkpoint"):
        load_checkpoint(tmp_path, *made())
    with pytest.raises(ValueError, match=r"'gate', 'done', .*Pruner\.state_dict"):
        made()[2].load_state_dict({})


def test_random_numbers_of_the_models_device_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()

    class Device:  # CUDA's part of torch, with a generator that runs everywhere
        @staticmethod
        def get_rng_state(device: torch.device) -> torch.Tensor:
            return generator.get_state()

        @staticmethod
        def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
            generator.set_state(state)

    model = nn.Linear(2, 2)
    monkeypatch.setattr(checkpoint, "_device", lambda model: torch.device("cuda", 1))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    states = checkpoint._random_states(model)
    wanted = torch.rand(3), torch.rand(3, generator=generator)
    checkpoint._restore_random([states], model, None)
    assert torch.equal(torch.rand(3), wanted[0])
    assert torch.equal(torch.rand(3, generator=generator), wanted[1])


def test_a_checkpoint_that_is_not_complete_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlsprune.io.checkpoint.save_state", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path)
    with pytest.raises(FileError, match=r"state\.safetensors"):
        load_checkpoint(tmp_path, *made())
