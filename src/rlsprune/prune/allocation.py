"""The allocation of an event over the layers: all layers are ranked together by how much cutting them raises the loss.

Each layer is cut on trial, in steps of its ξ. The price of a step is the rise of the loss divided by the cost it saves.
The cheapest steps are taken until they save as much as the first step of every layer would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsprune.graph import Group, plan_cuts
from rlsprune.prune.settings import Settings

STEPS = 3
"""Number of times that a trial removes ξ of the remaining units of a layer; no event removes more."""

# The share of the loss, per step, below which an increase is not distinguished from none.
_LEAST = 1e-3
_HALVINGS = 20


def most_gone(ratio: float, steps: int = STEPS) -> float:
    """Returns the share of a group that goes in several steps, each of which removes ξ of what is left."""
    return 1 - (1 - ratio) ** steps


Trial = Callable[[Settings, str], Sequence[tuple[int, float]]]
"""A function that cuts a group as the settings say, up to `STEPS` times, as long as units may go, and undoes it. It
returns the number of units left and the loss after each cut."""


class Step(NamedTuple):
    """One possible cut of a group, and its effect on the loss."""

    ratio: float
    """The ξ that removes as much in one cut."""
    gone: float
    """The share of the group's units that was removed on trial."""
    increase: float
    """The rise of the loss."""


def allocate(
    settings: Settings, groups: Sequence[Group], tensors: Mapping[str, float], before: float, trial: Trial
) -> Settings:
    """Returns settings whose event saves as much, but with ratios chosen so that the loss rises least.

    Args:
        settings: The settings, with the ξ of every group.
        groups: The groups of the network.
        tensors: Name of a parameter → its present cost.
        before: The present loss of the network.
        trial: A function that cuts one group on trial.

    Raises:
        ValueError: The loss is not finite before any cut, or is not finite after the first cut of every group.
    """
    if not math.isfinite(before):
        raise ValueError(
            f"held_out_loss() gave {before} before anything was cut: training has diverged, so lower the learning rate"
        )
    steps: dict[str, list[Step]] = {}
    for group in groups:
        ratio = settings.ratio_of(group)
        if not ratio:
            continue
        # The optimizer's P is discarded after the trial, and slicing it is cheapest.
        alone = replace(settings.shared_out({group.name: ratio}), inverse="slice")
        for number, (left, loss) in enumerate(trial(alone, group.name), 1):
            increase = max(loss - before, _LEAST * number * abs(before)) if math.isfinite(loss) else math.inf
            steps.setdefault(group.name, []).append(Step(most_gone(ratio, number), 1 - left / group.size, increase))
    if not steps:
        return settings
    if all(group_steps[0].increase == math.inf for group_steps in steps.values()):
        raise ValueError(
            f"held_out_loss() gave {before:g} before anything was cut, and no number after any cut: let it "
            "evaluate the model itself, in its present shape"
        )
    return settings.shared_out(share_out(steps, Costs(tensors, [group for group in groups if group.name in steps])))


class Costs:
    """The costs of a network without a share of each group's units.

    Args:
        tensors: Name of a parameter → its present cost.
        groups: The groups that can be cut, of two units or more each.
    """

    def __init__(self, tensors: Mapping[str, float], groups: Sequence[Group]) -> None:
        self._fixed = sum(tensors.values())
        self._cut: dict[str, tuple[float, dict[int, dict[str, float]]]] = {}
        """Name of a parameter → its cost, and for each of its dimensions the share that belongs to each group."""
        self._of_group: dict[str, list[str]] = {}
        self._levels = {group.name: group.level for group in groups}
        for group in groups:
            cuts = plan_cuts([(group, [0])])
            # Leaves out buffers, and all but the first name of a shared parameter.
            self._of_group[group.name] = [name for name in cuts.tensors if name in tensors]
            for name in self._of_group[group.name]:
                if name not in self._cut:
                    self._cut[name] = (tensors[name], {})
                    self._fixed -= tensors[name]
                for dim, stay in cuts.tensors[name].items():
                    size = cuts.shapes[name][dim]
                    self._cut[name][1].setdefault(dim, {})[group.name] = group.size * (size - len(stay)) / size

    def without(self, gone: Mapping[str, float]) -> float:
        """Returns the cost of the network after each group has lost the given share of its units."""
        total: float = self._fixed + sum(self._cost(name, gone) for name in self._cut)
        return total

    def saved(self, gone: Mapping[str, float], group: str, share: float) -> float:
        """Returns the cost saved if one group loses this share of its units instead of the one in ``gone``."""
        changed = {**gone, group: share}
        saved: float = sum(self._cost(name, gone) - self._cost(name, changed) for name in self._of_group[group])
        return saved

    def savings(self, gone: Mapping[str, float], group: str, shares: Tensor) -> Tensor:
        """Returns the cost saved for each of several shares that one group may lose instead of the one in ``gone``."""
        changed = {**gone, group: shares}
        saved = torch.zeros_like(shares)
        for name in self._of_group[group]:
            saved += self._cost(name, gone) - self._cost(name, changed)
        return saved

    def _cost(self, name: str, gone: Mapping[str, Any]) -> Any:
        cost, dims = self._cut[name]
        for parts in dims.values():
            # Shares of heads and of the dimensions inside them multiply; shares of neighbours add up.
            left: dict[int, Any] = {}
            for group, part in parts.items():
                level = self._levels[group]
                left[level] = left.get(level, 1.0) - part * gone.get(group, 0.0)
            for share in left.values():
                cost = cost * share
        return cost


def share_out(steps: Mapping[str, Sequence[Step]], costs: Costs) -> dict[str, float]:
    """Returns a ratio for each group that is cut. Together they save what the first step of every group would.

    The steps with the lowest rise of the loss per saved cost are taken first.

    Args:
        steps: Name of a group → its possible steps, each going further than the one before.
        costs: The costs of the network without some of its units.
    """
    goal = costs.without({name: ahead[0].gone for name, ahead in steps.items()})
    further = {name: list(ahead) for name, ahead in steps.items()}
    taken = dict.fromkeys(steps, Step(0.0, 0.0, 0.0))
    while any(further.values()):
        gone = {name: step.gone for name, step in taken.items()}
        prices = {
            (name, step): (step.increase - taken[name].increase) / costs.saved(gone, name, step.gone)
            for name, ahead in further.items()
            for step in ahead
        }
        name, step = min(prices, key=prices.__getitem__)
        if prices[name, step] == math.inf:
            break
        if costs.without({**gone, name: step.gone}) <= goal:
            taken[name] = _just_enough(costs, gone, name, [taken[name], *further[name]], goal)
            break
        taken[name] = step
        further[name] = [other for other in further[name] if other.gone > step.gone]
    return {name: step.ratio for name, step in taken.items() if step.ratio}


def _just_enough(costs: Costs, gone: Mapping[str, float], name: str, way: Sequence[Step], goal: float) -> Step:
    """Returns the smallest cut between successive steps of a group that brings the network's cost down to the goal."""

    def enough(share: float) -> bool:
        return costs.without({**gone, name: share}) <= goal

    before, after = next(pair for pair in pairwise(way) if enough(pair[1].gone))
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if enough(before.gone + middle * (after.gone - before.gone)):
            high = middle
        else:
            low = middle
    return Step(*(start + high * (end - start) for start, end in zip(before, after, strict=True)))
