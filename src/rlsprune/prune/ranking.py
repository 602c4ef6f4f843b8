"""The input features that are left, and the order in which the others went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlsprune.graph import Group
from rlsprune.model.selector import full_in_features, kept_inputs
from rlsprune.prune.event import PruneEvent

__all__ = ["inputs_left", "ranked_inputs"]


def inputs_left(groups: Iterable[Group]) -> dict[str, Tensor | None]:
    """Returns for each group of input features, by name, the indices of those that are left; None if all are."""
    return {group.name: kept_inputs(group.consumers[0].module) for group in groups if group.is_input}


def ranked_inputs(
    groups: Iterable[Group], first: Mapping[str, Sequence[int]], history: Sequence[PruneEvent]
) -> dict[str, Tensor]:
    """Ranks the features of each group of input features: 1 if they are left, 2 if they went last, and so on.

    Args:
        groups: All groups of channels that can go.
        first: Name of a group that had lost features before the first event → the features that were left. The others
            rank last.
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
    """Ranks features like ``ranking_`` of scikit-learn's RFE: 1 if they are left, 2 if they went last, and so on.

    Args:
        name: Name of the group of input features.
        width: Number of features that the network takes.
        first: Features that the network used before the first event, ascending. The others rank last.
        history: Events, roll-backs included. Features that one event removed share a rank.
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
