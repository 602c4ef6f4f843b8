"""The entry of a layer's P in the optimizer's state: functions that create, join, move and upgrade it.

`optimizer.state[weight]["inverse"]` is a dict of plain values: ``{"P"}``, or ``{"C", "T", "beta", "rows", "rank"}``
(`rlsprune.optim.factored.initial_factors`). A form, `Whole` or `Factored`, wraps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlsprune.optim import factors, functional
from rlsprune.optim.factored import Factored, FactoredStep, capacity, initial_factors
from rlsprune.optim.packing import INVERSE, InverseState
from rlsprune.optim.whole import Whole, WholeStep

Form = Whole | Factored
InverseStep = WholeStep | FactoredStep

RANK = 16
"""Number of directions of the mean inputs kept apart by default; docs/settings.md has the measurements."""


def in_factors(inputs: int, rank: int | None) -> bool:
    """Whether P of a layer is kept in factors: if C in float32 and T in float64 take less memory than P."""
    return rank is not None and inputs > 2 * capacity(rank)


def initial_entry(x: Tensor, p0: float, rank: int | None) -> InverseState:
    """Returns the entry of ``P = p0·I`` for this mean input, ``(G, n)``: in factors if those are smaller than P."""
    return _initial(x, p0, rank if in_factors(x.shape[-1], rank) else None)


def renewed(entry: InverseState, shape: Sequence[int], p0: float) -> InverseState:
    """Returns the entry of ``P = p0·I`` in the form of a given entry, for a mean input of this shape."""
    return _initial(form_of(entry).like.new_empty(*shape), p0, entry.get("rank"))


def _initial(x: Tensor, p0: float, rank: int | None) -> InverseState:
    return {"P": functional.initial_inverse(x, p0)} if rank is None else initial_factors(x, p0, rank)


def form_of(entry: InverseState) -> Form:
    """Wraps the entry of one layer's P in its form."""
    return Whole(entry) if "P" in entry else Factored(entry)


def inverse_step(sizes: Sequence[Sequence[InverseState]]) -> InverseStep:
    """Prepares P of several layers for a step, from the entries of the layers of each size, all of one `kind`.

    Tensors that are joined for it lie in memory one after the other from then on (`rlsprune.optim.packing.pack`).
    """
    return WholeStep(sizes[0]) if "P" in sizes[0][0] else FactoredStep(sizes)


def kind(entry: InverseState) -> tuple[Any, ...]:
    """Returns a key that is equal for layers that can be stepped as one: with P in factors, their sizes may differ."""
    parts = (value for key, value in entry.items() if key != "C")
    return tuple((part.shape, part.dtype) if isinstance(part, Tensor) else part for part in parts)


def of_groups(entry: InverseState, keep: Tensor) -> InverseState:
    """Returns a new entry with some of the groups."""
    return {key: value[keep] if isinstance(value, Tensor) else value for key, value in entry.items()}


def moved(entry: InverseState, like: Tensor) -> InverseState:
    """Returns the entry on the device of a mean input, with P or C in its dtype; the entry itself if it already is."""
    main, small = form_of(entry).like, factors.wide(like.device)
    if main.device == like.device and main.dtype == like.dtype:
        return entry
    return {
        key: v.to(like.device, like.dtype if v is main else small) if isinstance(v, Tensor) else v
        for key, v in entry.items()
    }


def upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """Upgrades a parameter's saved state: version 0.1.0 saved P as a list of diagonal blocks, which becomes P whole."""
    blocks = state.get(INVERSE)
    if not isinstance(blocks, list):
        return state
    by_group = [torch.block_diag(*parts) for parts in zip(*blocks, strict=True)]  # type: ignore[no-untyped-call]
    return state | {INVERSE: {"P": torch.stack(by_group)}}
