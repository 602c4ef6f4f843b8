"""The costs of a network, and the share of them that pruning aims at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from rlsprune.graph.layers import join
from rlsprune.model.calls import ExampleInputs, measurable
from rlsprune.model.counts import count, flops_per_weight, parameter_count
from rlsprune.model.latency import latency


class Budget:
    """The present and the original costs of a network."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs, target: Mapping[str, float]) -> None:
        self._model, self._example_inputs, self._target = model, example_inputs, target
        self._rates, flops = flops_per_weight(measurable(model), example_inputs)
        self.original: dict[str, float] = {"params": parameter_count(model), "flops": flops}
        self.original |= {what: self._cost(what) for what in target if what not in self.original}
        """The costs of the whole network."""

    def costs(self) -> dict[str, int]:
        """Returns parameters and FLOPs. Does not run the network if its FLOPs are proportional to its weights."""
        if self._rates is None:
            params, flops = count(measurable(self._model), self._example_inputs)
            return {"params": params, "flops": flops}
        return {"params": parameter_count(self._model), "flops": sum(self._flops().values())}

    def reached(self) -> bool:
        """Whether a target is reached."""
        return any(self._cost(what) <= share * self.original[what] for what, share in self._target.items())

    def tensors(self) -> dict[str, float]:
        """Returns for each parameter, by name, its share of all parameters plus its share of all FLOPs.

        If FLOPs are not proportional to weights, only the share of the parameters counts.
        """
        costs = self.costs()
        params, flops = self.tensors_of("params"), self.tensors_of("flops")
        return {name: params[name] / costs["params"] + flops[name] / max(costs["flops"], 1) for name in params}

    def aim(self) -> tuple[dict[str, float], float]:
        """Returns the cost of each parameter in the target's one resource, and how much of the resource may be left.

        Without exactly one target of parameters or countable FLOPs it returns `tensors` and 0.
        """
        counted = [what for what in self._target if what == "params" or (what == "flops" and self.proportional)]
        if not len(counted) == len(self._target) == 1:
            return self.tensors(), 0.0
        return self.tensors_of(counted[0]), self._target[counted[0]] * self.original[counted[0]]

    def tensors_of(self, what: str) -> dict[str, float]:
        """Returns for each parameter, by name, its number of entries, or the FLOPs that it takes if they are known."""
        if what == "params":
            return {name: parameter.numel() for name, parameter in self._model.named_parameters()}
        flops = Counter[int]()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, own in self._flops().items():
            flops[id(parameters[name])] += own  # summed over all layers that share it
        return {name: flops[id(parameter)] for name, parameter in self._model.named_parameters()}

    @property
    def proportional(self) -> bool:
        """Whether the FLOPs are proportional to the weights, so that they are known without running the network."""
        return self._rates is not None

    @property
    def countable(self) -> bool:
        """Whether there is a target, and none of it is measured: latency differs from call to call."""
        return bool(self._target) and "latency" not in self._target

    def _flops(self) -> dict[str, int]:
        """Returns the FLOPs that each weight takes, by name."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        names = {join(layer, "weight"): rate for layer, rate in (self._rates or {}).items()}
        return {name: rate * parameters[name].numel() for name, rate in names.items()}

    def _cost(self, what: str) -> float:
        return latency(self._model, self._example_inputs)[0] if what == "latency" else self.costs()[what]
