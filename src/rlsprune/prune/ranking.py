"""Input features: which are left, and in which order the others went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlsprune.graph import Group
from rlsprune.model.selector import full_in_features, kept_inputs
from rlsprune.prune.event import PruneEvent

__all__ = ["inputs_left", "ranked_inputs"]


def inputs_left(groups: Iterable[Group]) -> dict[str, Tensor | None]:
    """Name of each group of input features → the indices of those that are left, None if that is all of them."""
    return {group.name: kept_inputs(group.consumers[0].module) for group in groups if group.is_input}


def ranked_inputs(
    groups: Iterable[Group], first: Mapping[str, Sequence[int]], history: Sequence[PruneEvent]
) -> dict[str, Tensor]:
    """Name of each group of input features → their ranks: 1 if they are left, 2 if they went last, and so on.

    Args:
        groups: All channels that can go.
        first: Of groups that had lost features before the first event: those that were left. The others rank last.
        history: Events, roll-backs included.

    Raises:
        ValueError: There are no flat input features.
    """
    widths = {
        group.name: full_in_features(layer)
        for group in groups
        if group.is_input and isinstance(layer := group.consumers[0].module, nn.Linear)
    }
    if not widths:
        raise ValueError("the network reads no flat input features that could go: nothing can be ranked")
    return {name: _ranks(name, width, first.get(name, range(width)), history) for name, width in widths.items()}


def _ranks(name: str, width: int, first: Sequence[int], history: Sequence[PruneEvent]) -> Tensor:
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
