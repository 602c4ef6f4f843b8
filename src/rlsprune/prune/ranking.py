"""In which order input features went: the history of a pruner as a ranking."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.prune.event import PruneEvent


def input_ranks(name: str, width: int, first: Sequence[int], history: Sequence[PruneEvent]) -> Tensor:
    """1 for the features that are left, 2 for those that went last, and so on: as ``ranking_`` of scikit-learn's RFE.

    Args:
        name: Of the group of input features.
        width: How many the network takes.
        first: Those that it used before the first event, ascending. The others went earlier, and rank last.
        history: Events, roll-backs included. Features that one event took share a rank.
    """
    left, gone = list(first), list[list[int]]()
    for event in history:
        if event.kind == "roll-back":
            size = next(change.after for change in event.layers if change.name == name)
            while gone and len(left) < size:
                left = sorted(left + gone.pop())
        elif event.removed.get(name):
            gone.append([left[unit] for unit in event.removed[name]])
            left = sorted(set(left) - set(gone[-1]))
    ranks = torch.full((width,), len(gone) + 2)
    ranks[left] = 1
    for rank, features in enumerate(reversed(gone), 2):
        ranks[features] = rank
    return ranks
