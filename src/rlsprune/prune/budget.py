"""What a network costs, and the share of it that pruning aims at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rlsprune._model import ExampleInputs
from rlsprune.profile import count, latency


class Budget:
    """Costs of a network as it is now, beside what they were at first."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs, target: Mapping[str, float]) -> None:
        self._model, self._example_inputs, self._target = model, example_inputs, target
        self._counted: tuple[list[torch.Size], dict[str, int]] | None = None
        self.original = {what: self._cost(what) for what in {"params": 0, "flops": 0, **target}}
        """What the whole network costs."""

    def costs(self) -> dict[str, int]:
        """Parameters and FLOPs; counted anew only if a shape has changed."""
        shapes = [parameter.shape for parameter in self._model.parameters()]
        if self._counted is None or self._counted[0] != shapes:
            params, flops = count(self._model, self._example_inputs)
            self._counted = shapes, {"params": params, "flops": flops}
        return self._counted[1]

    def reached(self) -> bool:
        """Whether a target is reached."""
        return any(self._cost(what) <= share * self.original[what] for what, share in self._target.items())

    @property
    def countable(self) -> bool:
        """Whether there is a target, and one that is counted: what is measured is never quite the same again."""
        return bool(self._target) and "latency" not in self._target

    def _cost(self, what: str) -> float:
        return latency(self._model, self._example_inputs)[0] if what == "latency" else self.costs()[what]
