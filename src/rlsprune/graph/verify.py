"""Proof by experiment: a network without some channels must equal the network with them zeroed where they are read."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from rlsprune.graph.groups import Group
from rlsprune.graph.trial import CutTrial, Mismatch
from rlsprune.model.interrupts import stop_if_interrupted

# A forward pass costs about a third of a forward and backward pass: 40 of those, less what finding the groups takes.
_MOST_RUNS = 100


def verify_groups(
    trial: CutTrial, groups: Sequence[Group], order: Mapping[nn.Module, int]
) -> tuple[list[Group], dict[str, str]]:
    """Keeps the groups from which any channels, or input features, can go.

    All are tried at once, up to half of each. An odd number stays, which shows code that needs the width to be a
    multiple of something, and not the same number in each group. Groups that share a layer are tried again in
    selections in which each of them is once without any other one that it meets: ``torch.chunk`` is right while both
    halves lose equally many, an attention may be told its sizes together with another group only, or take its number of
    heads from another block. After a failure, the first layer that went wrong tells where to look. A group that fails
    nearly always fails in its own block, and its twins fail in theirs.

    Args:
        trial: Trial of the network.
        groups: Groups to be proved.
        order: Module → position of its first call.

    Returns:
        The groups that passed, and name → reason of the others.
    """
    search = _Search(trial, order)
    search.sift(groups, 0.5)
    shared = _sharing([group for group in groups if group.name not in search.failed])
    for selection in _selections(shared):
        search.sift(selection, 1.0)
    return [group for group in groups if group.name not in search.failed], search.failed


def _selections(groups: Sequence[Group]) -> list[list[Group]]:
    """Returns selections in which any two groups that meet are told apart both ways: each is once without the other.

    Groups that share a layer meet, and so do the heads of all attentions: their numbers are attributes, which a block
    could take from another one. Groups that do not meet can have the same number. Every number is in equally many
    selections, so none is in all of those that another number is in (Sperner's theorem).
    """
    numbers = _numbered(groups)
    most = max(numbers, default=0)
    count = next(count for count in itertools.count(1) if math.comb(count, count // 2) > most)
    words = list(itertools.combinations(range(count), max(count // 2, 1)))
    chosen = [[group for group, own in zip(groups, numbers, strict=True) if at in words[own]] for at in range(count)]
    return [selection for selection in chosen if selection]


def _numbered(groups: Sequence[Group]) -> list[int]:
    """Returns a small number for each group, different from those of all groups that it meets."""
    taken: dict[nn.Module | str, set[int]] = {}
    numbers = []
    for group in groups:
        places: set[nn.Module | str] = {member.module for member in group.members}
        if group.attention is not None and not group.level:
            places.add("heads")
        others = set[int]().union(*(taken.get(place, ()) for place in places))
        numbers.append(next(number for number in itertools.count() if number not in others))
        for place in places:
            taken.setdefault(place, set()).add(numbers[-1])
    return numbers


def _sharing(groups: Sequence[Group]) -> list[Group]:
    count = Counter(member.axis for group in groups for member in group.producers + group.carriers)
    return [g for g in groups if any(count[member.axis] > 1 for member in g.producers + g.carriers)]


class _Search:
    """Finds which groups fail, in few runs of the network."""

    def __init__(self, trial: CutTrial, order: Mapping[nn.Module, int]) -> None:
        self.trial, self.order = trial, order
        self.failed: dict[str, str] = {}

    def sift(self, groups: Sequence[Group], amount: float) -> None:
        """Tries these groups together, and as long as they fail finds one that does."""
        while left := [group for group in groups if group.name not in self.failed]:
            stop_if_interrupted()
            fault = self.trial.fault(left, amount)
            if fault is None:
                return
            if self.trial.runs > _MOST_RUNS:
                why = f"it could not be told apart from groups that fail in {_MOST_RUNS} runs ({fault.why})"
                self.failed.update({group.name: why for group in left})
                return
            self.failed.update(self._culprits(left, amount, fault))

    def _culprits(self, groups: Sequence[Group], amount: float, fault: Mismatch) -> dict[str, str]:
        """Returns name → reason of groups that fail: one, and those of the same layer in other blocks that do too."""
        groups = sorted(groups, key=lambda group: self._distance(group, fault.layer))
        near = self.trial.fault_nearby(groups[:1], amount)
        if near is None:
            return self._told_apart(groups, amount, fault)
        failed = {groups[0].name: near.why}
        alike = [group for group in groups if _kind(group.name) == _kind(groups[0].name)]
        parts = [self.trial.part_of([group]) for group in alike]
        for twin, part in list(zip(alike, parts, strict=True))[1:]:
            if part is None or parts.count(part) > 1:
                continue  # each would take a run of the whole part that they are in
            stop_if_interrupted()
            own = self.trial.fault_nearby([twin], amount, trusted=near.raised)
            if own is not None:
                failed[twin.name] = own.why
        return failed

    def _told_apart(self, groups: list[Group], amount: float, fault: Mismatch) -> dict[str, str]:
        """Returns the same, by runs of the whole network, if the first group does not fail by itself nearby."""
        found, why = self._culprit(groups, amount, fault)
        failed = {found.name: why}
        twins = [group for group in groups if group is not found and _kind(group.name) == _kind(found.name)]
        if twins and sum(_kind(name) == _kind(found.name) for name in self.failed) > 1:
            # The same layer of every block: the others are not told apart.
            again = self.trial.fault(twins, amount)
            failed.update({group.name: again.why for group in twins} if again is not None else {})
        return failed

    def _culprit(self, groups: list[Group], amount: float, fault: Mismatch) -> tuple[Group, str]:
        """Returns a group that fails by itself, or together with others that do not fail by themselves, and why."""
        size = 1
        while len(groups) > 1:
            # The nearest, then twice as many, then halves.
            half = min(size, len(groups) // 2)
            first = self.trial.fault(groups[:half], amount)
            groups, fault, size = (groups[:half], first, half) if first else (groups[half:], fault, 2 * size)
        return groups[0], fault.why

    def _distance(self, group: Group, layer: nn.Module | None) -> tuple[bool, int]:
        """Returns how far before a layer the group's last member works; groups wholly after it come last."""
        place = self.order.get(layer, 0) if layer is not None else 0
        places = [self.order[m.module] for m in group.members if m.module in self.order]
        before = [place - other for other in places if other <= place]
        return (not before, min(before, default=0))


def _kind(name: str) -> str:
    """Returns the name of a layer without the number of its block."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name)
