"""What the ranks that train one network do together in an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlsprune.distributed.ranks import Ranks
from rlsprune.distributed.shards import balance, gather_states
from rlsprune.model.tensors import is_sharded
from rlsprune.optim.faults import Check
from rlsprune.optim.recorder import Recorder

__all__ = ["Team", "step_cost"]

# So many multiplications of a large product take as long as the update of one entry of P, which goes through memory:
# about the ratio of the two speeds that `rlsprune plan` measures. Only the balance over the ranks depends on it.
_UPDATE_COST = 16


def step_cost(out: int, inputs: int, groups: int = 1, block_size: int | None = None) -> float:
    """What a layer's step costs, in multiplications: P∇W and the update of P."""
    block = inputs if block_size is None else min(block_size, inputs)
    return inputs * block * (out + groups * _UPDATE_COST)


class Team:
    """The ranks, and which of them steps which layer.

    Without owners every rank steps every layer, with the same result. With owners a layer's P and velocities are its
    owner's alone, who steps it and sends the weights to all others.
    """

    def __init__(self, ranks: Ranks, groups: Sequence[dict[str, Any]], shard: bool, block_size: int | None) -> None:
        """Checks that all ranks have the same layers and settings.

        Args:
            ranks: All of them create the same optimizer.
            groups: The optimizer's parameter groups.
            shard: Whether layers have owners.
            block_size: Of P, for the cost.
        """
        self.ranks = ranks
        layers = [group for group in groups if group["preconditioned"]]
        self.fsdp = any(is_sharded(p) for group in groups for p in group["params"])
        if shard and self.fsdp:
            raise ValueError(
                "shard=True divides P by layer, and fully_shard has divided the weights by row: leave it out"
            )
        self._owners: dict[str, int] | None = None
        if shard:
            shapes = [group["params"][0].shape for group in layers]
            costs = [step_cost(shape[0], shape[1:].numel(), 1, block_size) for shape in shapes]
            self._owners = {
                group["name"]: owner for group, owner in zip(layers, balance(costs, ranks.size), strict=True)
            }
        settings = {
            f"{key} of group {group.get('name')!r}": [tuple(p.shape) for p in value] if key == "params" else value
            for group in groups
            for key, value in group.items()
        }
        ranks.agree("the optimizer", settings | {"shard": shard, "block_size": block_size})

    @property
    def sharded(self) -> bool:
        """Whether layers have owners."""
        return self._owners is not None

    def owner(self, group: Mapping[str, Any]) -> int | None:
        """Who steps a parameter group; None for all ranks."""
        return self._owners[group["name"]] if self._owners is not None and group["preconditioned"] else None

    def owns(self, group: Mapping[str, Any]) -> bool:
        """Whether this rank steps a parameter group."""
        return self.owner(group) in (None, self.ranks.rank)

    def share_means(self, groups: Sequence[dict[str, Any]], recorders: Mapping[str, Recorder]) -> list[Check]:
        """Lets every recorder hold what the recorders of all ranks have collected: one message per dtype and device."""
        layers = [group for group in groups if group["preconditioned"]]
        vectors = [recorders[g["name"]].collected(g["params"][0], len(g["params"]) > 1) for g in layers]
        checks = []
        for kind in dict.fromkeys((vector.dtype, vector.device) for vector in vectors):
            same = [i for i, vector in enumerate(vectors) if (vector.dtype, vector.device) == kind]
            total = torch.cat([vectors[i] for i in same])
            self.ranks.sum_(total)
            for i, part in zip(same, torch.split(total, [len(vectors[i]) for i in same]), strict=True):
                name = layers[i]["name"]
                check = recorders[name].replace(part, self.ranks.size)
                if check is not None:
                    what = f"the mean input of layer {name!r}, which only some ranks have called"
                    checks.append(([(i, what)], check.view(1)))
        return checks

    def share_checks(self, checks: list[Check], device: torch.device) -> list[Check]:
        """Adds whether all is well on the other ranks, where those look at other numbers than this one."""
        if not (self.sharded or self.fsdp):
            return checks
        flags = [torch.ones(1, dtype=torch.bool), *(flags for _, flags in checks)]
        here = torch.cat([flag.to(device, non_blocking=True) for flag in flags]).all()
        everywhere = self.ranks.all_true(here).view(1)
        last = 1 + max((place for names, _ in checks for place, _ in names), default=0)  # after what was found here
        return [*checks, ([(last, "something on another rank, whose own message says what")], everywhere)]

    def publish(self, groups: Sequence[dict[str, Any]]) -> None:
        """Sends every layer's parameters from its owner to all others."""
        if self.sharded:
            self.ranks.exchange(
                [
                    [p for group in groups if self.owner(group) == rank for p in group["params"]]
                    for rank in range(self.ranks.size)
                ]
            )

    def whole(
        self, groups: Sequence[dict[str, Any]], states: Sequence[dict[str, Any] | None]
    ) -> list[dict[str, Any] | None]:
        """The states of all parameters, in the order of the groups, on every rank."""
        if not self.sharded:
            return list(states)
        pairs = [(group, p) for group in groups for p in group["params"]]
        owners = [self.owner(group) for group, _ in pairs]
        return gather_states(self.ranks, states, owners, [p.device for _, p in pairs])
