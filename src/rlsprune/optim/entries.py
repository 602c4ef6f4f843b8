"""What the optimizer keeps of a layer's P: made, joined, moved, copied and read from files.

`optimizer.state[weight]["inverse"]` is a dict of plain values: ``{"P"}``, or ``{"C", "T", "beta", "rows", "rank"}``
(:mod:`rlsprune.optim.factors`). A form (:mod:`rlsprune.optim.forms`) wraps the values of one layer, or of several equal
layers as one with the groups of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlsprune.optim import factors, functional
from rlsprune.optim.factored import Factored
from rlsprune.optim.forms import Form, InverseState
from rlsprune.optim.packing import INVERSE, pack
from rlsprune.optim.whole import Whole

RANK = 16
"""How many directions of the mean inputs are kept apart by default: docs/settings.md has the measurements."""


def capacity(rank: int) -> int:
    """How many rows C has room for: half as many again, so that it is compressed once in rank/2 steps."""
    return rank + -(-rank // 2)


def in_factors(inputs: int, rank: int | None) -> bool:
    """Whether P of a layer is kept in factors: where C in float32 and T in float64 take less than P."""
    return rank is not None and inputs > 2 * capacity(rank)


def initial_entry(x: Tensor, p0: float, rank: int | None) -> InverseState:
    """``P = p0·I`` for a layer with this mean input ``(G, n)``: in factors, if those are smaller than P."""
    if not in_factors(x.shape[-1], rank):
        return {"P": functional.initial_inverse(x, p0)}
    assert rank is not None
    C, T, beta = factors.initial_factors(x, p0, capacity(rank))
    return {"C": C, "T": T, "beta": beta, "rows": 0, "rank": rank}


def entry_bytes(inputs: int, rank: int | None) -> int:
    """What :func:`initial_entry` takes for each group of a float32 layer on a device with float64."""
    if rank is None or not in_factors(inputs, rank):
        return 4 * inputs**2
    return 4 * capacity(rank) * inputs + 8 * capacity(rank) ** 2 + 8


def form_of(entry: InverseState) -> Form:
    """The form of one layer's P."""
    if "P" in entry:
        return Whole(entry["P"])
    return Factored(**entry, entries=[entry])


def packed_form(entries: Sequence[InverseState]) -> Form:
    """The form of several equal layers' P, which from then on lie in memory one after the other (:func:`pack`)."""
    first = entries[0]
    tensors = {key: pack([(entry, key) for entry in entries]) for key in first if isinstance(first[key], Tensor)}
    if "P" in first:
        return Whole(tensors["P"])
    return Factored(**tensors, rows=first["rows"], rank=first["rank"], entries=entries)


def kind(entry: InverseState) -> tuple[Any, ...]:
    """What has to be equal for layers to be stepped as one."""
    return tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in entry.values())


def moved(entry: InverseState, like: Tensor) -> InverseState:
    """The entry on the device of a mean input, P or C in its dtype; itself, if it is so already."""
    main = entry.get("P", entry.get("C"))
    assert isinstance(main, Tensor)
    if main.device == like.device and main.dtype == like.dtype:
        return entry
    small = factors.wide(like.device)
    return {
        key: v.to(like.device, like.dtype if v is main else small) if isinstance(v, Tensor) else v
        for key, v in entry.items()
    }


def copied(entry: InverseState, device: torch.device) -> InverseState:
    """A copy of the entry on a device, in its own dtypes."""
    return {key: v.to(device, copy=True) if isinstance(v, Tensor) else v for key, v in entry.items()}


def upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's saved state. Version 0.1.0 saved P as a list of diagonal blocks, which becomes P whole."""
    blocks = state.get(INVERSE)
    if not isinstance(blocks, list):
        return state
    by_group = [torch.block_diag(*parts) for parts in zip(*blocks, strict=True)]  # type: ignore[no-untyped-call]
    return state | {INVERSE: {"P": torch.stack(by_group)}}
