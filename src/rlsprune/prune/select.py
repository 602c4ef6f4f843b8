"""The choice of the units that go, from their scores: Eq. (30), with its edge cases defined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlsprune.graph import Group
from rlsprune.model.arguments import check_iterable, shown
from rlsprune.prune.settings import Settings

# Up to this share of a layer goes at once, a larger one in several rounds. More rounds did not leave more accuracy.
_AT_ONCE, _ROUNDS = 0.2, 4


def cut_size(ratio: float, count: int) -> int:
    """Returns ⌊ratio · count⌋, guarded against rounding errors: 0.3 · 10 is 3."""
    return math.floor(ratio * count + 1e-9)


def choose_units(name: str, scores: Sequence[Tensor], size: int, ratio: float, keep: int, round_to: int) -> list[int]:
    """Returns the units that are in the worst ⌊ratio·n⌋ of every score vector.

    Ties go to the lower index, so the choice is deterministic. If ``keep`` or ``round_to`` let fewer go, those with the
    lowest first score go.

    Args:
        name: Name of the group, for messages.
        scores: Vectors ``(size,)``, in which low scores go first, or matrices ``(size, k)`` that score the nodes of
            each unit: then nodes are chosen, and a unit goes if any of its nodes does.
        size: Number of units.
        ratio: ξ.
        keep: Least number of units that stay.
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
    """Returns how many of ``count`` chosen units may go: at least ``keep`` stay, a multiple of ``round_to`` or all."""
    stay = max(size - count, min(keep, size))
    return size - min(size, -(-stay // round_to) * round_to)


def rounds(group: Group, settings: Settings, free_multiple: int) -> list[tuple[float, int, int]]:
    """Returns the ratio, the least number of units that stay and their multiple, for each round in which units go.

    Two channels that can replace each other both score low while both are there. So if such scores choose, a large
    share goes in rounds, each scored after the refit of the one before.

    The free multiple applies unless the settings ask for one. It is halved until something can go.
    """
    ratio = settings.ratio_of(group)
    if group.is_input and ratio and "inputs" in settings.target:
        ratio = max(ratio, 1 / group.size)  # at least one feature, or a small target would never be reached
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
