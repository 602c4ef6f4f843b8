"""Chooses what can go from each attention, by trials on the first of those that the same code computes, by itself.

The choice is proved afterwards, on the whole network.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlsprune.graph.attention import Candidate
from rlsprune.graph.groups import Group
from rlsprune.graph.heads import Rescaled
from rlsprune.graph.trial import CutTrial

__all__ = ["settle_attention"]

_INSIDE = {"keys", "values", "dims"}


def settle_attention(candidates: Sequence[Candidate], trial: CutTrial) -> tuple[list[Group], dict[str, str]]:
    """Chooses the groups of each attention: heads, and queries, keys and values or dimensions of all three.

    Returns:
        The groups, and name → reason of what cannot go.
    """
    settled: dict[tuple[str, ...], _Choice] = {}
    groups: list[Group] = []
    failed: dict[str, str] = {}
    for candidate in candidates:
        if candidate.kind not in settled:
            settled[candidate.kind] = _Choice(candidate, trial)
        own, why = settled[candidate.kind].of(candidate)
        groups += own
        failed.update(why)
    return groups, failed


class _Choice:
    """The findings about one attention, for all that are alike."""

    def __init__(self, candidate: Candidate, trial: CutTrial) -> None:
        self._fitted = self._outer = False
        self._rescaled: Rescaled = None
        self._parts: list[str] = []
        self._failed: dict[str, str] = {}
        self._try_all(candidate, trial, fitted=False)
        stay = candidate.heads is not None and "heads" not in self._parts
        if stay or (candidate.keys is not None and not _INSIDE & set(self._parts)):
            self._try_all(candidate, trial, fitted=candidate.home is not None)

    def _try_all(self, candidate: Candidate, trial: CutTrial, fitted: bool) -> None:
        for part in ("heads", "queries", "keys", "values"):
            self._try(candidate, part, trial, fitted)
        if not {"keys", "values"} <= set(self._parts):
            self._try(candidate, "dims", trial, fitted)
            if "dims" in self._parts:
                self._parts = [part for part in self._parts if part not in ("keys", "values")]

    def _try(self, candidate: Candidate, part: str, trial: CutTrial, fitted: bool) -> None:
        """Tries to remove a unit, with each choice of the attributes that may have to change and of the scale."""
        if part in self._parts or getattr(candidate, part) is None or (part in _INSIDE and "dims" in self._parts):
            return
        outer = (self._outer, True) if candidate.outer and not self._outer else (self._outer,)
        scaled: tuple[Rescaled, ...] = (self._rescaled,)
        if self._rescaled is None and (part in ("keys", "dims") or (fitted and candidate.reads_input)):
            scaled = (None, "head_dim" if part in ("keys", "dims") else "input")
        for choice in itertools.product((fitted,), outer, scaled):
            fault = trial.fault_nearby([getattr(_with(candidate, *choice), part)], 0.0)
            if fault is None:
                self._fitted |= fitted
                _, self._outer, self._rescaled = choice
                self._parts.append(part)
                self._failed.pop(part, None)
                return
            self._failed.setdefault(part, fault.why)

    def of(self, candidate: Candidate) -> tuple[list[Group], dict[str, str]]:
        """Returns the groups of an attention, and name → reason of what cannot go."""
        candidate = _with(candidate, self._fitted, self._outer, self._rescaled)
        groups = [group for part in self._parts if (group := getattr(candidate, part)) is not None]
        parts = (
            self._failed
            if "dims" not in self._parts
            else {k: v for k, v in self._failed.items() if k in ("heads", "queries")}
        )
        return groups, {f"{candidate.attention.name}[{part}]": why for part, why in parts.items()}


def _with(candidate: Candidate, fitted: bool, outer: bool, rescaled: Rescaled) -> Candidate:
    sizes = candidate.attention.sizes + (candidate.outer if outer else ())
    return candidate.with_attention(sizes=sizes, rescaled=rescaled, fitted=candidate.home if fitted else None)
