"""From scores to the units that go: Eq. (30), with its edges settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlsprune.graph import Group
from rlsprune.model.arguments import check_iterable, shown
from rlsprune.prune.settings import Settings

# Up to this share of a layer goes at once, more in so many rounds. More rounds did not leave more accuracy.
_AT_ONCE, _ROUNDS = 0.2, 4


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
        if not score.dim():
            raise ValueError(f"the criterion gave single numbers for {name!r}: return a list of score vectors")
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


def rounds(group: Group, settings: Settings, free_multiple: int) -> list[tuple[float, int, int]]:
    """Ratio, units that stay at least, and what their number is a multiple of, for each round in which units go.

    Of two channels that stand in for each other, each scores low as long as the other is there. So where a large share
    goes by such scores, it goes in rounds, each scored after the refit of the one before.

    The free multiple is kept unless one is asked for. Where it would let nothing go, half of it is, and so on.
    """
    ratio = settings.ratio_of(group)
    if group.is_input and ratio and "inputs" in settings.target:
        ratio = max(ratio, 1 / group.size)  # one at least, or a small number would never be reached
    if not cut_size(ratio, group.size):
        return []
    keep = settings.least_inputs(group) if group.is_input else settings.min_channels
    round_to = 1 if group.is_input else settings.round_to or free_multiple
    while settings.round_to is None and round_to > 1:
        if most_to_go(group.size, cut_size(ratio, group.size), keep, round_to):
            break
        round_to //= 2
    if settings.criterion != "obs" or not settings.compensate or ratio <= _AT_ONCE:
        return [(ratio, keep, round_to)]
    going = most_to_go(group.size, cut_size(ratio, group.size), keep, round_to)
    gone = [going * number // _ROUNDS for number in range(_ROUNDS + 1)]
    return [((after - before) / (group.size - before), 1, 1) for before, after in pairwise(gone) if after > before]
