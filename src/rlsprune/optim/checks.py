"""Checks for settings that make no sense, layers resized behind RLS's back, and states of other networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.model.arguments import check_argument, is_count
from rlsprune.model.demands import check_network
from rlsprune.optim.entries import form_of, upgraded
from rlsprune.optim.packing import INVERSE, VELOCITY, State

_Range = tuple[Callable[[Any], object], str]
_FROM_ZERO: _Range = (lambda number: 0 <= number < math.inf, "a number ≥ 0")
_POSITIVE: _Range = (lambda number: 0 < number < math.inf, "a number > 0")
_DTYPES = (None, torch.float32, torch.float64)
_RANGES: dict[str, _Range] = {
    "lr": _FROM_ZERO,
    "momentum": (lambda share: 0 <= share < 1, "in [0, 1)"),
    "forgetting": (lambda share: 0 < share <= 1, "in (0, 1]"),
    "mean_scale": _POSITIVE,
    "p0": _POSITIVE,
    "rank": (lambda rank: rank is None or is_count(rank), "None or a whole number, at least 1"),
    "weight_decay": _FROM_ZERO,
    "fallback_lr": _FROM_ZERO,
    "dtype": (lambda dtype: dtype in _DTYPES, "None, torch.float32 or torch.float64"),
    "on_fault": (lambda what: what in ("raise", "skip"), "'raise' or 'skip'"),
}


def check_settings(model: object, **settings: Any) -> None:
    """Raises if one of `rlsprune.RLS`'s settings is out of its range, or there is nothing to train."""
    for name, value in settings.items():
        check_argument(name, value, *_RANGES[name])
    if not isinstance(model, nn.Module):
        raise TypeError(f"RLS takes the module itself, not {type(model).__name__}: pass model, not model.parameters()")
    check_network(model, values=False)
    for name, p in model.named_parameters():
        if any(size > 1 and not stride for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(f"entries of {name!r} share memory (strides {p.stride()}): clone() it to train it")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: unfreeze the layers to train first")


def check_unresized(group: Mapping[str, Any], state: State) -> None:
    """Raises if something has given a layer another size without cutting what the optimizer keeps for it."""
    for what, was, now in _other_sizes(group, [state.get(p, {}) for p in group["params"]]):
        raise RuntimeError(
            f"layer {group['name']!r} was resized: its {what} has size {was}, the layer {now}. "
            "Prune with rlsprune.Pruner, which cuts the optimizer's state as well, or make a new optimizer"
        )


def states_for(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Returns what a state dict holds for each parameter.

    Raises:
        ValueError: The state dict is for other layers, or for other shapes.
    """
    saved_groups = state_dict["param_groups"]
    names = [[group.get("name") for group in every] for every in (saved_groups, groups)]
    if names[0] != names[1]:
        raise ValueError(f"the state dict has layers {names[0]}, this optimizer {names[1]}: build the same model")
    states: dict[Tensor, dict[str, Any]] = {}
    for saved_group, group in zip(saved_groups, groups, strict=True):
        saved = [upgraded(state_dict["state"].get(key, {})) for key in saved_group["params"]]
        for what, was, now in _other_sizes(group, saved):
            raise ValueError(
                f"layer {group.get('name')!r}: the saved {what} has size {was}, the layer {now}: load the pruned "
                "model (rlsprune.load) before its optimizer"
            )
        states |= {p: own for p, own in zip(group["params"], saved, strict=False) if own}
    return states


def _other_sizes(group: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yields what is kept in another size than the layer's: its name, its size, and the layer's."""
    for p, own in zip(group["params"], kept, strict=False):
        inputs = p.shape[1:].numel() + (len(group["params"]) > 1)
        if INVERSE in own and (was := form_of(own[INVERSE]).like.shape[-1]) != inputs:
            yield "P", was, inputs
        if VELOCITY in own and own[VELOCITY].shape != p.shape:
            yield "velocity", tuple(own[VELOCITY].shape), tuple(p.shape)
