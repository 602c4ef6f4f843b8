"""The number of units that every group keeps, so that a network meets a cost with the least error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlsprune.graph import Group
from rlsprune.prune.allocation import Costs
from rlsprune.prune.elimination import Curve

__all__ = ["choose_widths"]

_HALVINGS = 40
_ROUNDING = 1e-12  # relative tolerance for a goal that is met exactly
_SWEEPS = 3  # passes over all groups, as the cost of one depends on the widths of its neighbours


def choose_widths(
    curves: Mapping[str, Curve], groups: Sequence[Group], costs: Costs, goal: float, *, least: int, round_to: int
) -> dict[str, int]:
    """Chooses how many units of each group go.

    The errors of the groups add up, so the best choice has one price: a group loses units as long as the saved cost
    times the price exceeds the added error. The price is found by bisection. Then units are given back as far as the
    goal allows.

    Args:
        curves: Name of a group → the errors of losing its units.
        groups: The groups that may be cut.
        costs: The costs of the network without some of its units.
        goal: The cost that the network may have.
        least: Number of units that every group keeps.
        round_to: The number of units that are kept is a multiple of this, or all. Not for features of the input.

    Returns:
        Name of a group → number of units that go. If the goal is out of reach, as many as may go.
    """
    choices = [_Choices(group, curves[group.name], least, round_to) for group in groups]

    def fits(found: Sequence[int]) -> bool:
        return costs.without(_shares(choices, found)) <= goal

    low, high = 0.0, 1.0
    while not fits(found := _at_price(choices, costs, high)) and high < 1e30:
        low, high = high, high * 16
    if fits(found):
        for _ in range(_HALVINGS):
            middle = (low + high) / 2 if low else high / 16
            if fits(better := _at_price(choices, costs, middle)):
                high, found = middle, better
            else:
                low = middle
        found = _given_back(choices, found, costs, goal)
    return {choice.name: choice.gone[index] for choice, index in zip(choices, found, strict=True)}


class _Choices:
    """The numbers of units that may go from one group, none first."""

    def __init__(self, group: Group, curve: Curve, least: int, round_to: int) -> None:
        keep, multiple = (1, 1) if group.is_input else (least, round_to)
        allowed = [
            gone
            for gone in range(group.size)
            if not gone or (group.size - gone >= keep and (group.size - gone) % multiple == 0)
        ]
        self.name, self.gone = group.name, allowed
        self.errors = torch.tensor([curve.costs[gone] for gone in allowed], dtype=torch.float64)
        """The errors, as shares of the variance."""
        self.shares = torch.tensor(allowed, dtype=torch.float64) / group.size
        """The shares of the units that go."""


def _shares(choices: Sequence[_Choices], found: Sequence[int]) -> dict[str, float]:
    return {choice.name: float(choice.shares[index]) for choice, index in zip(choices, found, strict=True)}


def _at_price(choices: Sequence[_Choices], costs: Costs, price: float) -> list[int]:
    """Returns the best choice of each group at a price, the error that is accepted per unit of cost."""
    found = [0] * len(choices)
    for _ in range(_SWEEPS):
        before = list(found)
        for number, choice in enumerate(choices):
            saved = costs.savings({**_shares(choices, found), choice.name: 0.0}, choice.name, choice.shares)
            found[number] = int((choice.errors - price * saved).argmin())
        if found == before:
            break
    return found


def _given_back(choices: Sequence[_Choices], found: Sequence[int], costs: Costs, goal: float) -> list[int]:
    """Gives units back while the goal is still met, those first that save most error per cost."""
    found = list(found)
    while True:
        shares = _shares(choices, found)
        left = goal - costs.without(shares)
        best, worth = -1, -1.0  # below 0: units that save no error are given back, too
        for number, choice in enumerate(choices):
            if not found[number]:
                continue
            index = found[number]
            spent = -float(costs.savings(shares, choice.name, choice.shares[index - 1]))
            gained = float(choice.errors[index] - choice.errors[index - 1])
            if spent <= left + _ROUNDING * goal and gained / max(spent, 1e-300) > worth:
                best, worth = number, gained / max(spent, 1e-300)
        if best < 0:
            return found
        found[best] -= 1
