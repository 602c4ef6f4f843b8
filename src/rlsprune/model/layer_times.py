"""The time that each layer of a network takes in one inference."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

from torch import Tensor, nn

from rlsprune.model.calls import ExampleInputs, device_of
from rlsprune.model.modes import inference
from rlsprune.model.tensors import wait_for

__all__ = ["layer_times"]

_RUNS = 15


def layer_times(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, float]:
    """Measures the seconds that each module with a weight of its own takes, as the median of several inferences.

    Args:
        model: Network on the device of the inputs; a copy of it runs.
        example_inputs: Inputs that it is called with.

    Returns:
        Name of a module → the time of all its calls. Modules that are not called have none.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    with inference(model, example_inputs) as (plain, args, kwargs):
        device = device_of(plain, (args, kwargs))
        started: dict[str, float] = {}

        def now() -> float:
            wait_for(device)
            return time.perf_counter()

        for name, module in plain.named_modules():
            if isinstance(module._parameters.get("weight"), Tensor):

                def before(*_: object, name: str = name) -> None:
                    started[name] = now()

                def after(*_: object, name: str = name) -> None:
                    spent[name][-1] += now() - started[name]

                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
                spent[name] = []
        for _ in range(_RUNS):
            for times in spent.values():
                times.append(0.0)
            plain(*args, **kwargs)
    return {name: statistics.median(times) for name, times in spent.items() if any(times)}
