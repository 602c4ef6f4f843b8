"""Measures the cost of training with RLS and of a prune on this machine, relative to a step of momentum SGD."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from rlsprune.model.tensors import wait_for
from rlsprune.optim.rls import RLS
from rlsprune.prune.pruner import Pruner

__all__ = ["Cost", "measure_costs"]

_RATIO = 0.2  # share of every layer that the event removes
_STEPS = 5  # steps in a row: the first finds the caches full of other data
_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "step of momentum SGD": lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "step of AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "step of RLS": lambda model: RLS(model, lr=1e-3),
}
_SAMPLING = "step of RLS, sampling inputs"
_EVENT = f"prune of {100 * _RATIO:.0f} %, obs, exact P"


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of work."""

    name: str
    ratio: float
    """The median ratio to momentum SGD's step of the same round."""
    quartiles: tuple[float, float]
    """The quartiles of that ratio."""
    milliseconds: float
    """The median time."""
    state_bytes: int | None
    """The size of the optimizer's state; None for a prune."""


def measure_costs(model: nn.Module, inputs: Tensor, rounds: int = 5) -> list[Cost]:
    """Measures all costs in turns, so that other load on the machine slows all of them.

    Args:
        model: The network; it is copied.
        inputs: A batch. The loss is the mean square of the outputs, because the cost does not depend on it.
        rounds: Number of rounds, after one round that is not counted.

    Returns:
        The costs, momentum SGD first.
    """
    runs: dict[str, tuple[nn.Module, Optimizer]] = {}
    for name, make in _OPTIMIZERS.items():
        network = copy.deepcopy(model).train()
        runs[name] = (network, make(network))
    network = copy.deepcopy(model).train()
    sampling = Pruner(network, RLS(network, lr=1e-3), inputs[:1])
    runs[_SAMPLING] = (network, sampling.optimizer)
    seconds: dict[str, list[float]] = {name: [] for name in [*runs, _EVENT]}
    for turn in range(rounds + 1):
        for name in seconds:
            gc.collect()  # garbage of the previous work is not charged to the next
            taken = _event(*runs[_SAMPLING], inputs) if name == _EVENT else _step(*runs[name], inputs)
            if turn:
                seconds[name].append(taken)
    reference = next(iter(seconds.values()))
    costs = []
    for name, values in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(values, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        state = _state_bytes(runs[name][1]) if name in runs else None
        costs.append(Cost(name, middle, (low, high), 1e3 * statistics.median(values), state))
    return costs


def _step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> float:
    """Measures the seconds of a whole training step."""
    wait_for(inputs.device)
    start = time.perf_counter()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()
    wait_for(inputs.device)
    return (time.perf_counter() - start) / _STEPS


def _event(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> float:
    """Measures the seconds of a prune of a copy, which is discarded."""
    network, its_optimizer = copy.deepcopy((model, optimizer))
    pruner = Pruner(network, its_optimizer, inputs[:1], ratio=_RATIO, criterion="obs")
    pruner.calibrate([inputs])
    wait_for(inputs.device)
    start = time.perf_counter()
    pruner.prune()
    wait_for(inputs.device)
    return time.perf_counter() - start


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))
