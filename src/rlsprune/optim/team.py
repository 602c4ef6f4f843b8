"""Joint work of the ranks that train one network in an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlsprune.distributed.ranks import Ranks
from rlsprune.optim.faults import Check
from rlsprune.optim.recorder import Recorder


def agree(ranks: Ranks, groups: Sequence[dict[str, Any]]) -> None:
    """Checks that all ranks have the same layers and settings: every one steps every layer, with the same result."""
    settings = {
        f"{key} of group {group.get('name')!r}": [tuple(p.shape) for p in value] if key == "params" else value
        for group in groups
        for key, value in group.items()
    }
    ranks.agree("the optimizer", settings)


def share_means(ranks: Ranks, groups: Sequence[dict[str, Any]], recorders: Mapping[str, Recorder]) -> list[Check]:
    """Gives every recorder what the recorders of all ranks have collected, in one message per dtype and device."""
    layers = [group for group in groups if group["preconditioned"]]
    vectors = [recorders[g["name"]].collected(g["params"][0], len(g["params"]) > 1) for g in layers]
    checks: list[Check] = []
    for kind in dict.fromkeys((vector.dtype, vector.device) for vector in vectors):
        same = [i for i, vector in enumerate(vectors) if (vector.dtype, vector.device) == kind]
        total = torch.cat([vectors[i] for i in same])
        ranks.sum_(total)
        for i, part in zip(same, torch.split(total, [len(vectors[i]) for i in same]), strict=True):
            name = layers[i]["name"]
            check = recorders[name].replace(part, ranks.size)
            if check is not None:
                fault = (i, f"not the same on all ranks: the calls of layer {name!r}")
                checks.append((partial(list, [fault]), check.view(1)))
    return checks


def share_checks(ranks: Ranks, checks: list[Check], device: torch.device) -> list[Check]:
    """Adds a check of the checks of the other ranks, which see other numbers with ``fully_shard``."""
    flags = [torch.ones(1, dtype=torch.bool), *(flags for _, flags in checks)]
    here = torch.cat([flag.to(device, non_blocking=True) for flag in flags]).all()
    # It comes after the faults found here.
    fault = (math.inf, "not sound: something on another rank, whose own message says what")
    return [*checks, (partial(list, [fault]), ranks.all_true(here).view(1))]
