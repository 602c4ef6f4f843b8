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
from rlsprune.optim.factored import Factored, FactoredStep
from rlsprune.optim.forms import Form, InverseState, InverseStep
from rlsprune.optim.packing import INVERSE, pack
from rlsprune.optim.whole import Whole, WholeStep

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
    return Whole(entry["P"]) if "P" in entry else Factored(entry)


def inverse_step(sizes: Sequence[Sequence[InverseState]]) -> InverseStep:
    """P of layers in a step: for each size the entries of its layers, which are of one :func:`kind`.

    What is joined of them lies in memory one after the other from then on (:func:`pack`).
    """
    if "P" in sizes[0][0]:
        (same,) = sizes
        return WholeStep(pack([(entry, "P") for entry in same]))
    entries = [entry for same in sizes for entry in same]
    T, beta = (pack([(entry, key) for entry in entries]) for key in ("T", "beta"))
    return FactoredStep([pack([(entry, "C") for entry in same]) for same in sizes], T, beta, entries)


def kind(entry: InverseState) -> tuple[Any, ...]:
    """What has to be equal for layers to be stepped in one: with P in factors, all but their sizes."""
    tensors = [value for key, value in entry.items() if isinstance(value, Tensor) and key != "C"]
    others = [value for value in entry.values() if not isinstance(value, Tensor)]
    return *((value.shape, value.dtype) for value in tensors), *others


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
