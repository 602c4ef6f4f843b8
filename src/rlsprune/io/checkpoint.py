"""Checkpoints that every rank writes its part of, by ``torch.distributed.checkpoint``, for any number of ranks to load.

A folder holds ``model.safetensors`` and ``state.safetensors`` (the settings of the optimizer, and the pruner), which
rank 0 writes, and in ``parts/`` the optimizer's tensors, each written by a rank that has it; of a network divided by
``fully_shard`` the weights as well. No rank ever holds more than its own part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from rlsprune.distributed.ranks import find_ranks
from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError
from rlsprune.io.state import load_state, save_state
from rlsprune.model.calls import unwrap
from rlsprune.model.tensors import is_sharded

__all__ = ["load_checkpoint", "save_checkpoint"]

_MODEL, _STATE, _PARTS = "model.safetensors", "state.safetensors", "parts"


def save_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, pruner: Stateful | None = None
) -> None:
    """Writes a checkpoint; all ranks call it, on a file system that they share.

    Args:
        folder: Made if it is not there. What it holds is replaced: use a new one for every checkpoint.
        model: The network, wrapped or not.
        optimizer: Any optimizer whose state is tensors and numbers.
        pruner: The pruner, if there is one.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> save_checkpoint("checkpoint", model, torch.optim.AdamW(model.parameters()))
        >>> sorted(path.name for path in Path("checkpoint").iterdir())
        ['model.safetensors', 'parts', 'state.safetensors']
    """
    model, path, ranks = unwrap(model), Path(folder), find_ranks(model)
    parts: dict[str, Any] = {}
    plain: dict[str, dict[str, Any]] = {}
    names = _names(model)
    for parameter, entries in optimizer.state.items():
        name = names[parameter]
        for key, value in entries.items():
            if isinstance(value, dict):
                parts |= {_join("optimizer", name, key, own): v for own, v in value.items() if isinstance(v, Tensor)}
                value = {own: v for own, v in value.items() if not isinstance(v, Tensor)}
            if isinstance(value, Tensor):
                parts[_join("optimizer", name, key)] = value
            else:
                plain.setdefault(name, {})[key] = value
    divided = any(map(is_sharded, model.parameters()))
    if divided:
        parts |= {_join("model", name): tensor.detach() for name, tensor in model.state_dict().items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = {"groups": groups, "plain": plain, "pruner": None if pruner is None else pruner.state_dict()}
    if ranks is None or ranks.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        if not divided:
            modelfile.save(model, path / _MODEL)
        save_state(path / _STATE, state)
    if ranks is not None:
        ranks.gather(None)  # the folder is there
    save_parts(parts, checkpoint_id=path / _PARTS, no_dist=ranks is None)


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, pruner: Stateful | None = None
) -> None:
    """Loads a checkpoint that any number of ranks has written; all ranks call it.

    Only from a folder that you trust: ``torch.distributed.checkpoint`` unpickles the metadata of the parts, which can
    execute anything.

    Args:
        folder: Of :func:`save_checkpoint`.
        model: A fresh model, which takes the checkpoint's shape and weights. Wrap it (again) after this.
        optimizer: Of that model, with the same layers.
        pruner: Of both.

    Raises:
        FileError: The checkpoint is damaged, or of another model.

    Examples:
        >>> import torch
        >>> model, fresh = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> save_checkpoint("checkpoint", model, torch.optim.AdamW(model.parameters()))
        >>> load_checkpoint("checkpoint", fresh, torch.optim.AdamW(fresh.parameters()))
        >>> torch.equal(fresh.weight, model.weight)
        True
    """
    model, path = unwrap(model), Path(folder)
    state = load_state(path / _STATE)
    divided = any(map(is_sharded, model.parameters()))
    if not divided:
        modelfile.load(path / _MODEL, model)
    parameters = {name: parameter for parameter, name in _names(model).items()}
    saved = FileSystemReader(path / _PARTS).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    for key, outline in saved.items():
        kind, name, *_ = _split(key)
        if kind == "model":
            wanted[key] = model.state_dict()[name].detach()
            continue
        if name not in parameters:
            raise FileError(
                path, f"it has the state of {name!r}, which the model does not have", "build the same model"
            )
        wanted[key] = _room(parameters[name], outline)
    load_parts(wanted, checkpoint_id=path / _PARTS, no_dist=find_ranks(model) is None)
    _fill(optimizer, parameters, wanted, state)
    if pruner is not None and state["pruner"] is not None:
        pruner.load_state_dict(state["pruner"])


def _fill(optimizer: Optimizer, parameters: dict[str, Tensor], parts: dict[str, Any], state: dict[str, Any]) -> None:
    """Gives the optimizer what was loaded, by its own way of loading."""
    states: dict[str, dict[str, Any]] = state["plain"]
    for key, value in parts.items():
        kind, name, *rest = _split(key)
        if kind == "optimizer":
            entries = states.setdefault(name, {})
            if len(rest) == 1:
                entries[rest[0]] = value
            else:
                entries.setdefault(rest[0], {})[rest[1]] = value
    names = {id(parameter): name for name, parameter in parameters.items()}
    packed = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {
        number: states[names[id(parameter)]] for number, parameter in enumerate(order) if names[id(parameter)] in states
    }
    for group, saved in zip(packed["param_groups"], state["groups"], strict=True):
        group |= saved
    optimizer.load_state_dict(packed)


def _room(parameter: Tensor, outline: Any) -> Tensor:
    """Where a saved tensor goes: divided as its parameter is, if it has the parameter's shape."""
    dtype = outline.properties.dtype
    if is_sharded(parameter) and outline.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.empty(outline.size, dtype=dtype, device=parameter.device if len(outline.size) else "cpu")


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _join(*parts: str) -> str:
    return "/".join(parts)


def _split(key: str) -> list[str]:
    return key.split("/")
