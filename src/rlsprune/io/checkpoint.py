"""Checkpoints by ``torch.distributed.checkpoint``: every rank writes its part, and any number of ranks can load them.

A folder holds ``model.safetensors`` (unless ``fully_shard`` divides the network) and ``parts/`` with the optimizer's
tensors and the divided weights, each written by a rank that has it. ``state.safetensors`` is written last and holds all
else, and the digests of the other files. No rank ever holds more than its own part.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from rlsprune.distributed.ranks import Ranks, find_ranks
from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError, storing
from rlsprune.io.parts import joined, read_parts, taken_apart, write_parts
from rlsprune.io.state import load_state, save_state
from rlsprune.model.calls import unwrap
from rlsprune.model.interrupts import uninterrupted
from rlsprune.model.sharded import settle
from rlsprune.model.tensors import is_sharded

__all__ = ["load_checkpoint", "save_checkpoint"]

_MODEL, _STATE, _PARTS = "model.safetensors", "state.safetensors", "parts"
_KEYS = {"kind", "groups", "optimizer", "pruner", "random", "divided", "digests"}


def save_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, pruner: Stateful | None = None
) -> None:
    """Writes a checkpoint; all ranks call it, on a file system that they share.

    It includes the random state of every rank, so that a run resumed on as many ranks has bit-identical numbers.

    Args:
        folder: The folder, created if it does not exist. Its content is replaced, and is no checkpoint until all of it
            is written: use a new folder for every checkpoint.
        model: The network, wrapped or not.
        optimizer: Any optimizer whose state is tensors and numbers.
        pruner: The pruner, if there is one.

    Raises:
        ValueError: The optimizer also trains parameters outside the model.
        StorageError: The disk is full, read-only or failing.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> save_checkpoint("checkpoint", model, torch.optim.AdamW(model.parameters()))
        >>> sorted(path.name for path in Path("checkpoint").iterdir())
        ['model.safetensors', 'parts', 'state.safetensors']
    """
    model, path, ranks = unwrap(model), Path(folder), find_ranks(model)
    leads = ranks is None or ranks.rank == 0
    settle(model)
    parts: dict[str, Tensor] = {}
    names, grouping = _names(model), _grouping(optimizer, model)
    random = _random_states(model)
    state: dict[str, Any] = {
        "kind": type(optimizer).__name__,
        "groups": [group | {"params": own} for group, own in zip(optimizer.param_groups, grouping, strict=True)],
        "optimizer": taken_apart({names[p]: entries for p, entries in optimizer.state.items()}, "optimizer", parts),
        "pruner": None if pruner is None else taken_apart(pruner.state_dict(), "pruner", parts),
        "random": [random] if ranks is None else ranks.gather(random),
    }
    divided = any(map(is_sharded, model.parameters()))
    if divided:
        taken_apart(dict(model.named_parameters()), "model", parts)
        state["shape"] = modelfile.shape_of(model)
    state["divided"] = [name for name, tensor in parts.items() if is_sharded(tensor)]
    with storing(path):
        if leads:
            path.mkdir(parents=True, exist_ok=True)
            (path / _STATE).unlink(missing_ok=True)
            shutil.rmtree(path / _PARTS, ignore_errors=True)
            (path / _MODEL).unlink(missing_ok=True)
            if not divided:
                modelfile.save(model, path / _MODEL)
                state["model"] = modelfile.read_checksum(path / _MODEL)
        if ranks is not None:
            ranks.gather(None)  # waits until the folder exists
        state["digests"] = write_parts(path / _PARTS, parts, ranks)
        if leads:
            save_state(path / _STATE, state)
    if ranks is not None:
        ranks.gather(None)  # no rank goes on, or ends, before the checkpoint is complete


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, pruner: Stateful | None = None
) -> None:
    """Loads a checkpoint of any number of ranks, completely or not at all; all ranks call it.

    Load only folders that you trust: ``torch.distributed.checkpoint`` unpickles the metadata of the parts, which can
    execute anything.

    Args:
        folder: A folder of `save_checkpoint`.
        model: A fresh model, which takes the checkpoint's shape and weights. It may be divided by ``fully_shard`` or
            not, whether or not the saved one was. Wrap it in DistributedDataParallel afterwards.
        optimizer: An optimizer of that model, with the same layers.
        pruner: The pruner of both.

    Raises:
        FileError: The checkpoint is damaged, incomplete, or of another model or optimizer.
        ValueError: The optimizer also trains parameters outside the model, or the pruner follows other copies of it.

    Examples:
        >>> import torch
        >>> model, fresh = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> save_checkpoint("checkpoint", model, torch.optim.AdamW(model.parameters()))
        >>> load_checkpoint("checkpoint", fresh, torch.optim.AdamW(fresh.parameters()))
        >>> torch.equal(fresh.weight, model.weight)
        True
    """
    model, path, ranks = unwrap(model), Path(folder), find_ranks(model)
    settle(model)
    if not (path / _STATE).is_file():
        raise FileError(
            path, f"it is not a complete checkpoint: {_STATE}, written last, is missing", "load another one"
        )
    state = load_state(path / _STATE)
    divided = "shape" in state
    if not state.keys() >= _KEYS or not (divided or "model" in state):
        raise FileError(path / _STATE, "it is not the state of a checkpoint", "give a folder of save_checkpoint")
    grouping = _grouping(optimizer, model)
    if state["kind"] != type(optimizer).__name__:
        problem = f"its optimizer is {state['kind']}, and this one is {type(optimizer).__name__}"
        raise FileError(path, problem, "make the same optimizer")
    if not divided and not (path / _MODEL).is_file():
        raise FileError(path / _MODEL, "it is missing", "restore the folder")
    if not divided and state["model"] != modelfile.read_checksum(path / _MODEL):
        raise FileError(path / _MODEL, "it is not the one that was written with the state", "restore the folder")
    parameters = {name: parameter for parameter, name in _names(model).items()}
    parts = read_parts(path / _PARTS, state["digests"], partial(_room, path, parameters, set(state["divided"])), ranks)
    if grouping != [group["params"] for group in state["groups"]]:
        raise FileError(path, "its optimizer has other groups of parameters", "make the same optimizer")
    with uninterrupted(), modelfile.undone_on_error(model), _undone_on_error(optimizer):
        if divided:
            names = model.named_parameters(remove_duplicate=False)
            weights = {name: parts.get(f"model/{_names(model)[parameter]}") for name, parameter in names}
            modelfile.reshape(model, state["shape"], weights, path)
        else:
            modelfile.load(path / _MODEL, model)
        _fill(optimizer, parameters, joined(state["optimizer"], parts), state["groups"])
        if pruner is not None and state["pruner"] is not None:
            pruner.load_state_dict(joined(state["pruner"], parts))
        _restore_random(state["random"], model, ranks)


def _fill(
    optimizer: Optimizer, parameters: dict[str, Tensor], states: dict[str, Any], groups: list[dict[str, Any]]
) -> None:
    """Loads the state into the optimizer by its own `load_state_dict`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    packed = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {
        number: states[names[id(parameter)]] for number, parameter in enumerate(order) if names[id(parameter)] in states
    }
    for group, saved in zip(packed["param_groups"], groups, strict=True):
        group |= {key: value for key, value in saved.items() if key != "params"}
    optimizer.load_state_dict(packed)


def _random_states(model: nn.Module) -> dict[str, Tensor]:
    """Returns the random states of the CPU and of the kind of device that the model is on."""
    states, device = {"cpu": torch.get_rng_state()}, _device(model)
    if device.type != "cpu":
        place = () if device.type == "mps" else (device,)
        states[device.type] = torch.get_device_module(device).get_rng_state(*place)
    return states


def _restore_random(states: list[dict[str, Tensor]], model: nn.Module, ranks: Ranks | None) -> None:
    """Restores this rank's random state, if the checkpoint has it for this kind of device."""
    rank, device = 0 if ranks is None else ranks.rank, _device(model)
    if rank >= len(states):
        return
    if device.type != "cpu" and device.type in states[rank]:
        place = () if device.type == "mps" else (device,)
        torch.get_device_module(device).set_rng_state(states[rank][device.type], *place)
    torch.set_rng_state(states[rank]["cpu"])


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def _undone_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Restores the optimizer's state and settings if an error occurs inside."""
    states = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        raise


def _room(
    path: Path, parameters: dict[str, Tensor], divided: set[str], name: str, outline: TensorStorageMetadata
) -> Tensor:
    """Makes the tensor that a saved one is loaded into. In a divided network it is divided like the weights.

    That holds for tensors that were saved divided, and for those that have the shape of their parameter.
    """
    kind, owner, *rest = name.split("/")
    if kind != "pruner" and owner not in parameters:
        raise FileError(path, f"it has the state of {owner!r}, which the model does not have", "build the same model")
    like = next(iter(parameters.values())) if kind == "pruner" else parameters[owner]
    # An optimizer's direct entry for a parameter (not one inside another entry) has the parameter's shape.
    mirrors = kind == "optimizer" and len(rest) == 1 and len(outline.size) == like.dim()
    if is_sharded(like) and (name in divided or mirrors):
        from torch.distributed.tensor import zeros

        mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
        room: Tensor = zeros(outline.size, dtype=outline.properties.dtype, device_mesh=mesh, placements=placements)
        return room
    return torch.empty(outline.size, dtype=outline.properties.dtype, device=like.device)


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _grouping(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns the names of the parameters in each of the optimizer's groups."""
    names = _names(model)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter not in names:
            raise ValueError(
                f"the optimizer also trains a parameter of the shape {tuple(parameter.shape)} that is not in the "
                "model: make it a parameter of the model, or give it an optimizer of its own"
            )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
