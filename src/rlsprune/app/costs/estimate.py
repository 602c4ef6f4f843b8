"""Estimates the costs of training, pruning and shrinking a network on several ranks from shapes and three speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rlsprune.app.costs.work import Work, event_work, shrink_work
from rlsprune.model.arguments import check_argument
from rlsprune.model.tensors import tensors_in, wait_for
from rlsprune.optim.entries import in_factors, initial_entry
from rlsprune.optim.factored import capacity
from rlsprune.optim.layers import divide

__all__ = ["CostPlan", "LayerPlan", "Machine", "make_plan", "measure"]

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Machine:
    """The speeds of one rank."""

    gflops: float
    """The speed of a large matrix product, in 10⁹ floating-point operations a second."""
    gbytes: float
    """The memory traffic of the rank-one update of a large P, in 10⁹ bytes a second."""
    link: float = 12.5
    """The network bandwidth of a rank, in 10⁹ bytes a second; the default is 100 Gbit/s."""

    def seconds(self, multiplications: float, moved: float) -> float:
        """Computes the time of this many multiplications with their additions, and of moving this many bytes."""
        return 2e-9 * multiplications / self.gflops + 1e-9 * moved / self.gbytes


@dataclass(frozen=True)
class LayerPlan:
    """The cost of one layer."""

    name: str
    inputs: int
    """The inputs of each of the layer's groups, with the bias."""
    outputs: int
    groups: int
    inverse_bytes: int
    velocity_bytes: int
    seconds: float
    """The time of P∇W and the update of P in one step, if one rank does all of it."""


@dataclass(frozen=True)
class CostPlan:
    """The cost of a network on several ranks."""

    layers: tuple[LayerPlan, ...]
    world_size: int
    batch: int
    """Inputs of all ranks together."""
    rank: int | None
    machine: Machine
    sharded: bool
    """Whether ``fully_shard`` divides weights, gradients and velocities over the ranks; otherwise each has all."""
    parameter_bytes: int
    fallback_bytes: int
    """The velocities of the parameters that momentum SGD trains."""
    mean_bytes: int
    """The mean inputs of a step."""
    largest_bytes: int
    """The parameters of the largest block of layers, which ``fully_shard`` gathers to compute with."""
    flops: int | None
    """The FLOPs of a forward pass with one input; None if unknown."""
    clipped: bool
    """Whether outputs go through a ReLU, so that `shrink` solves for a layer several times."""

    @property
    def inverse_bytes(self) -> int:
        """Returns the size of P of all layers, which every rank has."""
        return sum(layer.inverse_bytes for layer in self.layers)

    @property
    def velocity_bytes(self) -> int:
        """Returns the size of the velocities of all ranks together, each counted once."""
        return self.fallback_bytes + sum(layer.velocity_bytes for layer in self.layers)

    @property
    def parts(self) -> int:
        """Returns the number of parts into which weights, gradients and velocities are divided."""
        return self.world_size if self.sharded else 1

    @property
    def state_bytes(self) -> int:
        """Returns the size of the optimizer's state on a rank."""
        return self.inverse_bytes + self.velocity_bytes // self.parts

    @property
    def seconds(self) -> float:
        """Returns the time of a step on a rank beyond momentum SGD; ``fully_shard`` divides it by outputs."""
        return sum(layer.seconds for layer in self.layers) / self.parts

    @property
    def training_bytes(self) -> int:
        """Returns the size of weights, gradients and state of a rank, without activations."""
        gathered = self.largest_bytes if self.parts > 1 else 0
        return 2 * self.parameter_bytes // self.parts + self.state_bytes + gathered

    @property
    def ranks_to_outgrow(self) -> int:
        """Returns the least number of ranks at which P outgrows a rank's part of weights, gradients and velocities."""
        return -(-(2 * self.parameter_bytes + self.velocity_bytes) // max(self.inverse_bytes, 1))

    def sent_bytes(self) -> dict[str, int]:
        """Computes the bytes that a rank sends in a ring per step: weights and gradients (as without RLS), means."""
        once = (self.world_size - 1) / self.world_size
        # fully_shard gathers the weights for the forward and the backward pass, and scatters the gradients' sums.
        return {
            "gradients": round((3 if self.parts > 1 else 2) * once * self.parameter_bytes),
            "means": round(2 * once * self.mean_bytes),
        }

    def work(self) -> list[Work]:
        """Returns one rank's work: a step of SGD, the extra of RLS, an event of a `Pruner`, and `rlsprune.shrink`."""
        sent = self.sent_bytes()
        step = [] if self.flops is None else [self._plain_step(self.flops, sent["gradients"])]
        rls = Work("RLS beyond it", self.inverse_bytes, self.seconds, sent["means"])
        shrink = [] if self.flops is None else [shrink_work(self, self.flops)]
        return [*step, rls, event_work(self), *shrink]

    def _plain_step(self, flops: int, sent: int) -> Work:
        """Estimates the forward pass, the backward pass (twice as much) and the update of momentum SGD."""
        own = max(1, self.batch // self.world_size)
        held = self.training_bytes - self.inverse_bytes
        moved = 5 * self.parameter_bytes // self.parts
        return Work("step of momentum SGD", held, self.machine.seconds(1.5 * flops * own, moved), sent)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and derived costs in plain containers."""
        derived = {
            "state_bytes": self.state_bytes,
            "seconds": self.seconds,
            "sent_bytes": self.sent_bytes(),
            "ranks_to_outgrow": self.ranks_to_outgrow,
            "work": [asdict(work) for work in self.work()],
        }
        return asdict(self) | derived


def make_plan(
    model: nn.Module,
    world_size: int,
    batch: int,
    machine: Machine,
    rank: int | None = 16,
    *,
    sharded: bool = False,
    flops: int | None = None,
) -> CostPlan:
    """Computes the cost of a network from its shapes.

    Args:
        model: The network; it may be on the meta device.
        world_size: Number of ranks.
        batch: Number of inputs in a batch of all ranks together.
        machine: The speeds of a rank.
        rank: The rank of P, as in `rlsprune.RLS`.
        sharded: Whether ``fully_shard`` divides the network, block by block.
        flops: FLOPs of a forward pass with one input.
    """
    check_argument("world_size", world_size, world_size >= 1, "at least 1")
    check_argument("batch", batch, batch >= 1, "at least 1")
    check_argument("rank", rank, rank is None or rank >= 1, "None or at least 1")
    parts = divide(model)
    plans, means = [], 0
    for name, layers in parts.layers.items():
        layer, weight = layers[0], layers[0].weight
        groups, inputs = getattr(layer, "groups", 1), weight.shape[1:].numel() + (layer.bias is not None)
        entry = initial_entry(torch.empty(groups, inputs, device="meta"), 1.0, rank)
        plans.append(
            LayerPlan(
                name=name,
                inputs=inputs,
                outputs=len(weight),
                groups=groups,
                inverse_bytes=sum(part.nbytes for part in tensors_in(entry)),
                velocity_bytes=_ITEM * sum(p.numel() for p in layer.parameters(recurse=False)),
                seconds=machine.seconds(*_work(groups, inputs, len(weight), rank)),
            )
        )
        means += groups * inputs + 2
    return CostPlan(
        layers=tuple(plans),
        world_size=world_size,
        batch=batch,
        rank=rank,
        machine=machine,
        sharded=sharded,
        parameter_bytes=_ITEM * sum(p.numel() for p in model.parameters()),
        fallback_bytes=_ITEM * sum(p.numel() for p in parts.others),
        mean_bytes=_ITEM * means,
        largest_bytes=_ITEM * _largest_block(model),
        flops=flops,
        clipped=any(isinstance(module, nn.ReLU | nn.ReLU6) for module in model.modules()),
    )


def _largest_block(model: nn.Module, listed: bool = False) -> int:
    """Counts the parameters of the largest member of a list of blocks, or of the largest layer outside of lists."""
    children = list(model.children())
    if listed or not children:
        return sum(p.numel() for p in model.parameters())
    lists = isinstance(model, nn.Sequential | nn.ModuleList)
    return max(_largest_block(child, lists) for child in children)


def _work(groups: int, inputs: int, outputs: int, rank: int | None) -> tuple[float, float]:
    """Counts the multiplications and the moved bytes of a layer's step beyond those of momentum SGD."""
    if rank is None or not in_factors(inputs, rank):
        return outputs * inputs**2, 2 * _ITEM * groups * inputs**2
    rows = (rank + 1 + capacity(rank)) / 2  # between two compressions
    # ∇W Zᵀ reads the gradient, its product with Z reads and writes the velocity; Z and Cx read C, which is small.
    moved = 3 * _ITEM * outputs * inputs + 4 * _ITEM * groups * rows * inputs
    return 2 * outputs * inputs * rows + groups * inputs * rows**2, moved


def measure(device: str = "cpu", size: int = 2048) -> Machine:
    """Measures the speeds of this machine: the best of a few matrix products, and of a few updates of a P."""
    P, gradient = torch.eye(size, device=device), torch.rand(size // 2, size, device=device)
    product = _best(lambda: gradient @ P, device)
    wide = 4 * size  # a P of 2,048 inputs stays in the cache of a large processor, and moves ten times as fast
    P, v = torch.eye(wide, device=device), torch.rand(wide, device=device) / wide
    update = _best(lambda: P.addcmul_(v.unsqueeze(-1), v.unsqueeze(-2), value=-1), device)
    return Machine(gflops=1e-9 * size**3 / product, gbytes=1e-9 * 2 * _ITEM * wide**2 / update)


def _best(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        wait_for(torch.device(device))
        times.append(time.perf_counter() - started)
    return min(times[1:])
