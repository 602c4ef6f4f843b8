"""How an event is allocated over the layers: all layers are ranked together by what cutting each costs the loss.

Each layer is cut on trial, in steps of its ξ. What the loss gained and what was saved tell the price of every step, and
the cheapest steps are taken until as much is saved as by the first step of every layer.
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
"""So many times ξ of what is left is taken from a layer on trial: no event takes more."""

# Of the loss, for each step: an increase below that is not told from none.
_LEAST = 1e-3
_HALVINGS = 20


def most_gone(ratio: float, steps: int = STEPS) -> float:
    """The share of a group that so many steps of ξ of what is left take."""
    return 1 - (1 - ratio) ** steps


Trial = Callable[[Settings, str], Sequence[tuple[int, float]]]
"""Cuts a group as the settings say, up to `STEPS` times, as long as units may go, and undoes it: the units left and the
loss after each time."""


class Step(NamedTuple):
    """How far a group may be cut."""

    ratio: float
    """ξ that does it at once."""
    gone: float
    """The share of its units that went on trial."""
    increase: float
    """Of the loss."""


def allocate(
    settings: Settings, groups: Sequence[Group], tensors: Mapping[str, float], before: float, trial: Trial
) -> Settings:
    """The settings of an event that saves as much, with ratios chosen so that the loss rises least.

    Args:
        settings: With the ξ of every group.
        groups: Of the network.
        tensors: Name of a parameter → what it costs as it is.
        before: The loss of the network as it is.
        trial: Tells what cutting one group does.

    Raises:
        ValueError: The loss is not finite before any cut, or after every one.
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
        # P of the optimizer is thrown away with the trial: sliced is the cheapest.
        alone = replace(settings.shared_out({group.name: ratio}), inverse="slice")
        for number, (left, loss) in enumerate(trial(alone, group.name), 1):
            increase = max(loss - before, _LEAST * number * abs(before)) if math.isfinite(loss) else math.inf
            steps.setdefault(group.name, []).append(Step(most_gone(ratio, number), 1 - left / group.size, increase))
    if not steps:
        return settings
    if all(group_steps[0].increase == math.inf for group_steps in steps.values()):
        raise ValueError(
            f"held_out_loss() gave {before:g} before anything was cut, and no number after any cut: let it "
            "evaluate the model itself, in the shape that it has at that moment"
        )
    return settings.shared_out(share_out(steps, Costs(tensors, [group for group in groups if group.name in steps])))


class Costs:
    """What a network would cost without a share of each group's units.

    Args:
        tensors: Name of a parameter → what it costs as it is.
        groups: Those that can be cut: of two units or more.
    """

    def __init__(self, tensors: Mapping[str, float], groups: Sequence[Group]) -> None:
        self._fixed = sum(tensors.values())
        self._cut: dict[str, tuple[float, dict[int, dict[str, float]]]] = {}
        """Name of a parameter → its cost, and for each of its dimensions the part of it that is each group's."""
        self._of_group: dict[str, list[str]] = {}
        self._levels = {group.name: group.level for group in groups}
        for group in groups:
            cuts = plan_cuts([(group, [0])])
            # No buffers, and of a shared parameter its first name alone.
            self._of_group[group.name] = [name for name in cuts.tensors if name in tensors]
            for name in self._of_group[group.name]:
                if name not in self._cut:
                    self._cut[name] = (tensors[name], {})
                    self._fixed -= tensors[name]
                for dim, stay in cuts.tensors[name].items():
                    size = cuts.shapes[name][dim]
                    self._cut[name][1].setdefault(dim, {})[group.name] = group.size * (size - len(stay)) / size

    def without(self, gone: Mapping[str, float]) -> float:
        """The cost left, by the share of its units that each group loses."""
        total: float = self._fixed + sum(self._cost(name, gone) for name in self._cut)
        return total

    def saved(self, gone: Mapping[str, float], group: str, share: float) -> float:
        """What is saved when one group loses another share than that."""
        changed = {**gone, group: share}
        saved: float = sum(self._cost(name, gone) - self._cost(name, changed) for name in self._of_group[group])
        return saved

    def savings(self, gone: Mapping[str, float], group: str, shares: Tensor) -> Tensor:
        """What is saved when one group loses each of these shares instead."""
        changed = {**gone, group: shares}
        saved = torch.zeros_like(shares)
        for name in self._of_group[group]:
            saved += self._cost(name, gone) - self._cost(name, changed)
        return saved

    def _cost(self, name: str, gone: Mapping[str, Any]) -> Any:
        cost, dims = self._cut[name]
        for parts in dims.values():
            # Of heads and of the dimensions inside of them, the shares multiply; of neighbours they add up.
            left: dict[int, Any] = {}
            for group, part in parts.items():
                level = self._levels[group]
                left[level] = left.get(level, 1.0) - part * gone.get(group, 0.0)
            for share in left.values():
                cost = cost * share
        return cost


def share_out(steps: Mapping[str, Sequence[Step]], costs: Costs) -> dict[str, float]:
    """The ratio of each group: together they save what the first step of every group would, at the lowest cost.

    Args:
        steps: Name of a group → how far it may be cut, further and further.
        costs: Of the network without some of its units.
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
    """On the way from one step of a group to the next and further, where the network first costs no more than that."""

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
