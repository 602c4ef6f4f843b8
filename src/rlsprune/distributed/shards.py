"""Which rank keeps what, and how what they keep is put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from rlsprune.distributed.ranks import Ranks

__all__ = ["balance", "gather_states"]


def balance(costs: Sequence[float], ranks: int) -> list[int]:
    """Gives each item to a rank, so that the dearest rank is as cheap as can easily be had.

    The dearest item first, each to the rank that has least so far: at most a third above the best possible.

    Returns:
        For each item its rank.
    """
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = loads.index(min(loads))
        owners[item] = rank
        loads[rank] += costs[item]
    return owners


def gather_states(
    ranks: Ranks, states: Sequence[dict[str, Any] | None], owners: Sequence[int | None], devices: Sequence[torch.device]
) -> list[dict[str, Any] | None]:
    """Every item's state, on every rank; it is taken from its owner, and what others have of it does not count.

    Args:
        ranks: All of them take part.
        states: Containers of tensors and plain values, or None.
        owners: Of each item; None for what every rank has.
        devices: Where each item's tensors are.
    """
    own = [tree_map(_outline, state) if owners[i] == ranks.rank else None for i, state in enumerate(states)]
    outlines = ranks.gather(own)
    whole: list[dict[str, Any] | None] = []
    for i, (state, owner) in enumerate(zip(states, owners, strict=True)):
        if owner is None:
            whole.append(state)
            continue
        entry = state if owner == ranks.rank else tree_map(partial(_empty, device=devices[i]), outlines[owner][i])
        for tensor in (part for part in tree_flatten(entry)[0] if isinstance(part, Tensor)):
            ranks.exchange([[tensor] if rank == owner else [] for rank in range(ranks.size)])
        whole.append(entry)
    return whole


class _Outline:
    """A tensor without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(value: object) -> object:
    return _Outline(value) if isinstance(value, Tensor) else value


def _empty(value: object, device: torch.device) -> object:
    return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, _Outline) else value
