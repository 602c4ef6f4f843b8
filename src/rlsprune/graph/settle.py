"""What can go from each attention: tried out on the first of those that the same code computes."""

from __future__ import annotations

from collections.abc import Sequence

from rlsprune.graph.attention import Candidate
from rlsprune.graph.groups import Group
from rlsprune.graph.verify import CutTrial

__all__ = ["settle_attention"]


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
    """What was found out about one attention, for all that are alike."""

    def __init__(self, candidate: Candidate, trial: CutTrial) -> None:
        self._outer = self._rescaled = False
        self._parts: list[str] = []
        self._failed: dict[str, str] = {}
        for part in ("heads", "queries"):
            self._try(candidate, part, trial)
        for part in ("keys", "values"):
            self._try(candidate, part, trial)
        if not {"keys", "values"} <= set(self._parts) and candidate.dims is not None:
            separate = [part for part in ("keys", "values") if part in self._parts]
            self._try(candidate, "dims", trial)
            if "dims" in self._parts:
                self._parts = [part for part in self._parts if part not in separate]

    def _try(self, candidate: Candidate, part: str, trial: CutTrial) -> None:
        """Tries to do without a unit, with the attributes that may have to change and the scale as it may be."""
        if getattr(candidate, part) is None:
            return
        outer = (self._outer, True) if candidate.outer and not self._outer else (self._outer,)
        scaled = (False, True) if part in ("keys", "dims") and not self._rescaled else (self._rescaled,)
        why = None
        for choice in [(own, scale) for own in outer for scale in scaled]:
            fault = trial.fault([getattr(_with(candidate, *choice), part)], 0.0)
            if fault is None:
                self._outer, self._rescaled = choice
                self._parts.append(part)
                return
            why = why or fault.why
        assert why is not None
        self._failed[part] = why

    def of(self, candidate: Candidate) -> tuple[list[Group], dict[str, str]]:
        """Groups, and name → reason, of an attention."""
        candidate = _with(candidate, self._outer, self._rescaled)
        groups = [group for part in self._parts if (group := getattr(candidate, part)) is not None]
        parts = (
            self._failed
            if "dims" not in self._parts
            else {k: v for k, v in self._failed.items() if k in ("heads", "queries")}
        )
        return groups, {f"{candidate.attention.name}[{part}]": why for part, why in parts.items()}


def _with(candidate: Candidate, outer: bool, rescaled: bool) -> Candidate:
    sizes = candidate.attention.sizes + (candidate.outer if outer else ())
    return candidate.with_attention(sizes=sizes, rescaled=rescaled)
