"""From scores to the units that go: Eq. (30), with its edges settled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.model.arguments import check_iterable, shown


def cut_size(ratio: float, count: int) -> int:
    """⌊ratio · count⌋, with the product guarded: 0.3 · 10 is 3."""
    return math.floor(ratio * count + 1e-9)


def choose_units(name: str, scores: Sequence[Tensor], size: int, ratio: float, keep: int, round_to: int) -> list[int]:
    """The units that are in the worst ⌊ratio·n⌋ of every score vector.

    Ties go to the lower index, so the choice is deterministic. Where ``keep`` or ``round_to`` let fewer go, those with
    the lowest first score do.

    Args:
        name: Of the group, for messages.
        scores: Vectors ``(size,)``, low goes first; or matrices ``(size, k)`` that score a unit's nodes: then nodes are
            chosen, and a unit goes if any of its nodes does.
        size: Number of units.
        ratio: ξ.
        keep: How many units stay at least.
        round_to: The number of units that stay is a multiple of this, or all.
    """
    check_iterable(f"what the criterion gave for {name!r}", scores, "return a list of score vectors")
    scores = list(scores)
    for score in scores:
        if not isinstance(score, Tensor):
            raise TypeError(f"the criterion gave {shown(score)} for {name!r}: return a list of score vectors")
    count = cut_size(ratio, size)
    if not scores or not count:
        return []
    nodes = max((score.shape[1] for score in scores if score.dim() == 2), default=1)
    orders = []
    for score in scores:
        if score.shape not in ((size,), (size, nodes)):
            raise ValueError(
                f"the criterion gave scores of shape {tuple(score.shape)} for {name!r}, which has {size} units: return "
                "one score for each"
            )
        if not bool(score.isfinite().all()):
            raise FloatingPointError(
                f"the criterion gave scores that are not finite for {name!r}: lower lr, or check the criterion"
            )
        flat = score.detach().cpu().reshape(size, -1).expand(size, nodes).flatten()
        orders.append(torch.sort(flat, stable=True).indices.tolist())
    worst = [order[: cut_size(ratio, size * nodes)] for order in orders]
    in_all = set(worst[0]).intersection(*worst[1:])
    chosen = list(dict.fromkeys(node // nodes for node in worst[0] if node in in_all))
    return sorted(chosen[: most_to_go(size, len(chosen), keep, round_to)])


def most_to_go(size: int, count: int, keep: int, round_to: int) -> int:
    """How many of ``count`` chosen units may go, so that ``keep`` stay and a multiple of ``round_to``, or all."""
    stay = max(size - count, min(keep, size))
    return size - min(size, -(-stay // round_to) * round_to)
