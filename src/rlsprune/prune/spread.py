"""How an event is spread over the layers: one ranking of all of them, by what it costs the loss to cut each.

Each layer is cut on trial, in steps of its ξ. What the loss gained and what was saved tell the price of every step, and
the cheapest steps are taken until as much is saved as by ξ of every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlsprune.graph import Group, plan_cuts
from rlsprune.prune.settings import Settings

STEPS = 3
"""So many times ξ is taken from a layer on trial. What is left then, (1 − ξ)³, is the least that an event leaves."""

# Of the loss, for each step: an increase below that is not told from none.
_LEAST = 1e-3
_HALVINGS = 20


class Costs:
    """What a network would cost without a share of each group's units.

    Args:
        tensors: Name of a parameter → what it costs as it is.
        groups: Those that can be cut.
    """

    def __init__(self, tensors: Mapping[str, float], groups: Sequence[Group]) -> None:
        self._fixed = sum(tensors.values())
        self._parts: dict[str, tuple[float, dict[int, dict[str, float]]]] = {}
        for group in groups:
            cuts = plan_cuts([(group, [0])])
            for name, dims in cuts.tensors.items():
                if name not in tensors:
                    continue  # a buffer, or a second name of a parameter
                if name not in self._parts:
                    self._parts[name] = (tensors[name], {})
                    self._fixed -= tensors[name]
                for dim, stay in dims.items():
                    size = cuts.shapes[name][dim]
                    self._parts[name][1].setdefault(dim, {})[group.name] = group.size * (size - len(stay)) / size

    def without(self, gone: Mapping[str, float]) -> float:
        """By the share of its units that each group loses."""
        total = self._fixed
        for cost, dims in self._parts.values():
            for shares in dims.values():
                cost *= 1 - sum(share * gone.get(group, 0.0) for group, share in shares.items())
            total += cost
        return total


def spread(
    settings: Settings,
    groups: Sequence[Group],
    tensors: Mapping[str, float],
    before: float,
    losses_of: Callable[[Settings], Sequence[float]],
) -> Settings:
    """The settings with the ratios of an event that saves as much, where that costs the loss least.

    Args:
        settings: With the ξ of every group.
        groups: Of the network.
        tensors: Name of a parameter → what it costs as it is.
        before: The loss of the network as it is.
        losses_of: Cuts as some settings say, `STEPS` times, and gives the loss after each; then undoes it.
    """
    if not math.isfinite(before):
        raise ValueError(f"evaluate() gave {before} before anything was cut: training has diverged")
    groups = [group for group in groups if group.size > 1]
    ratios = {group.name: settings.ratio_of(group) for group in groups if settings.ratio_of(group)}
    trials = {name: replace(settings.shared_out({name: ratio}), inverse="slice") for name, ratio in ratios.items()}
    losses = {name: losses_of(trial) for name, trial in trials.items()}
    return settings.shared_out(share_out(ratios, losses, before, Costs(tensors, groups)))


def share_out(
    ratios: Mapping[str, float], losses: Mapping[str, Sequence[float]], before: float, costs: Costs
) -> dict[str, float]:
    """The share of its units that each group loses, where that is cheapest.

    Args:
        ratios: Name of a group → its ξ.
        losses: Name of a group → the loss after each of the `STEPS` in which it alone was cut.
        before: The loss of the network as it is.
        costs: Of the network without some of its units.
    """

    def increase(loss: float, number: int) -> float:
        return max(loss - before, _LEAST * number * abs(before)) if math.isfinite(loss) else math.inf

    prices = {name: [0.0, *map(increase, after, range(1, STEPS + 1))] for name, after in losses.items()}

    def shares(steps: Mapping[str, float]) -> dict[str, float]:
        return {name: 1 - (1 - ratios[name]) ** number for name, number in steps.items() if number}

    def price_of(name: str, number: int) -> float:
        """Of going on to so many steps of a group, for what that saves."""
        saved = costs.without(shares(steps)) - costs.without(shares({**steps, name: number}))
        return (prices[name][number] - prices[name][steps[name]]) / saved if saved > 0 else math.inf

    goal = costs.without(ratios)
    steps = last = dict.fromkeys(losses, 0)
    while costs.without(shares(steps)) > goal:
        options = [(name, number) for name in steps for number in range(steps[name] + 1, STEPS + 1)]
        price, best = min(((price_of(*option), option) for option in options), default=(math.inf, None))
        if best is None or price == math.inf:
            break
        last, steps = steps, {**steps, best[0]: best[1]}
    enough, too_little = 1.0, 0.0  # of the last move
    result = shares(steps)
    for _ in range(_HALVINGS):
        part = (enough + too_little) / 2
        tried = shares({name: last[name] + part * (number - last[name]) for name, number in steps.items()})
        if costs.without(tried) <= goal:
            enough, result = part, tried
        else:
            too_little = part
    return result
