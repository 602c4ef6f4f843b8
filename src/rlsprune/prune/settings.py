"""The settings of prune events: everything that does not change from event to event."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rlsprune.graph import ChannelGraph, Group
from rlsprune.model.arguments import check_argument, is_count
from rlsprune.model.selector import full_in_features
from rlsprune.optim.rls import RLS
from rlsprune.prune.criteria import NAMES, Criterion
from rlsprune.statistics.rows import has_rows

TARGETS = ("params", "flops", "latency", "inputs")
INVERSES = ("schur", "slice", "reset")
"""The treatments of the optimizer's P when a layer loses inputs."""

AS_IN_PAPER: Mapping[str, Any] = {
    "ratio": 0.4,
    "warmup_epochs": 30,
    "criterion": "rls-paper",
    "compensate": False,
    "inverse": "slice",
    "statistics": "training",
    "tolerance": 0.0,
    "patience": None,
}
"""The arguments of a pruner that follows Algorithm 1."""


@dataclass(frozen=True)
class Settings:
    """The checked arguments of `rlsprune.Pruner`, which describes them."""

    optimizer: Optimizer
    ratio: float | Mapping[str, float]
    input_ratio: float | None
    criterion: str | Criterion
    compensate: bool
    inverse: str
    statistics: str
    min_channels: int
    round_to: int | None
    target: Mapping[str, float]

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS keeps its state in one flat vector that cannot be cut: use another optimizer")
        for name, value in self.ratio.items() if isinstance(self.ratio, Mapping) else [("", self.ratio)]:
            where = f"ratio[{name!r}]" if name else "ratio"
            check_argument(where, value, isinstance(value, Real) and 0 < value < 1, "in (0, 1)")
        given = self.input_ratio
        valid = given is None or (isinstance(given, Real) and 0 <= given < 1)
        check_argument("input_ratio", given, valid, "None or in [0, 1)")
        if not callable(self.criterion):
            known = f"one of {', '.join(NAMES)}, or a callable"
            check_argument("criterion", self.criterion, lambda name: name in NAMES, known)
        check_argument("compensate", self.compensate, lambda flag: flag in (True, False), "True or False")
        check_argument("inverse", self.inverse, lambda name: name in INVERSES, f"one of {', '.join(INVERSES)}")
        check_argument(
            "statistics", self.statistics, lambda name: name in ("exact", "training"), "'exact' or 'training'"
        )
        least, multiple = self.min_channels, self.round_to
        check_argument("min_channels", least, is_count(least), "a whole number, at least 1")
        check_argument(
            "round_to", multiple, multiple is None or is_count(multiple), "None or a whole number, at least 1"
        )
        check_argument("target", self.target, isinstance(self.target, Mapping), 'a mapping such as {"params": 0.1}')
        for what, share in self.target.items():
            counted = what == "inputs" and isinstance(share, Integral) and share >= 1
            valid = what in TARGETS and isinstance(share, Real) and (counted or 0 < share < 1)
            expected = f"{'/'.join(TARGETS)} → in (0, 1), or a number of inputs"
            check_argument("target", self.target, valid, expected)
        if self.statistics == "training" and self.needs_inverse and not isinstance(self.optimizer, RLS):
            raise ValueError(
                f"statistics='training' is RLS's own P, and the optimizer is {type(self.optimizer).__name__}: "
                "use statistics='exact'"
            )

    @property
    def needs_inverse(self) -> bool:
        """Whether P is needed at all."""
        return self.compensate or (isinstance(self.criterion, str) and self.criterion != "l1")

    @property
    def cost_target(self) -> dict[str, float]:
        """Returns the target without the number of inputs."""
        return {what: share for what, share in self.target.items() if what != "inputs"}

    def least_inputs(self, group: Group) -> int:
        """Returns the least number of features of an input that stay."""
        asked = self.target.get("inputs", 1)
        layer = group.consumers[0].module
        assert isinstance(layer, nn.Linear)
        return int(asked) if isinstance(asked, Integral) else max(1, math.ceil(asked * full_in_features(layer) - 1e-9))

    def ratio_of(self, group: Group) -> float:
        """Returns ξ of one group; 0 if it is left alone. A target of inputs only leaves all other groups alone."""
        if not group.is_input and self.target.keys() == {"inputs"}:
            return 0.0
        if group.is_input and self.input_ratio is not None:
            return self.input_ratio
        if isinstance(self.ratio, Mapping):
            return next((self.ratio[name] for name in _names(group) if name in self.ratio), 0.0)
        return self.ratio / 2 if group.is_input else self.ratio

    def scaled(self, share: float) -> Settings:
        """Returns the same settings with all ratios multiplied by a share in (0, 1]."""
        ratio = self.ratio
        smaller = (
            {name: value * share for name, value in ratio.items()} if isinstance(ratio, Mapping) else ratio * share
        )
        inputs = None if self.input_ratio is None else self.input_ratio * share
        return replace(self, ratio=smaller, input_ratio=inputs)

    def shared_out(self, ratios: Mapping[str, float]) -> Settings:
        """Returns the same settings with a ratio for each group, by its name; other groups are left alone."""
        return replace(self, ratio=ratios, input_ratio=None)

    def check_graph(self, graph: ChannelGraph) -> None:
        """Raises ValueError for ratios or targets that do not fit the groups, and for layers without the wanted P."""
        known = {name for group in graph for name in _names(group)}
        inputs = sum(group.is_input for group in graph)
        if "inputs" in self.target and not inputs:
            raise ValueError(
                f"target={dict(self.target)}: the network reads no flat input features that could go; leave inputs out"
            )
        if inputs > 1 and isinstance(self.target.get("inputs"), Integral):
            raise ValueError(f"target={dict(self.target)}: there are {inputs} inputs; give a fraction of each")
        unknown = set(self.ratio) - known if isinstance(self.ratio, Mapping) else set()
        if unknown:
            raise ValueError(f"ratio names {sorted(unknown)}, which cannot be pruned; there are {sorted(known)}")
        if not self.needs_inverse or self.statistics != "training":
            return
        groups = [group for group in self.optimizer.param_groups if group["preconditioned"]]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for member in (member for group in graph for member in group.consumers):
            if has_rows(member.module) and id(member.module.weight) not in trained:
                raise ValueError(
                    f"layer {member.name!r} is not trained by RLS but by momentum SGD, so it has no P: use "
                    "statistics='exact'"
                )


def _names(group: Group) -> list[str]:
    return [group.name, *(member.name for member in group.producers)]
