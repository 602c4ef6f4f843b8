"""What P costs per layer and per rank, by shapes alone and two measured speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rlsprune.distributed.shards import balance
from rlsprune.model.arguments import check_argument
from rlsprune.model.tensors import wait_for
from rlsprune.optim.layer_step import block_sizes
from rlsprune.optim.layers import divide
from rlsprune.optim.team import step_cost

__all__ = ["LayerPlan", "Machine", "Plan", "fitting_block_size", "make_plan", "measure"]

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Machine:
    """How fast one rank is."""

    gflops: float
    """Of a large matrix product, in 10⁹ floating-point operations a second."""
    gbytes: float
    """Moved by the rank-one update of a large P, in 10⁹ bytes a second."""

    def seconds(self, multiplications: float, moved: float) -> float:
        """Of so many multiplications with their additions, and so many bytes moved."""
        return 2e-9 * multiplications / self.gflops + 1e-9 * moved / self.gbytes


@dataclass(frozen=True)
class LayerPlan:
    """What one layer costs."""

    name: str
    inputs: int
    """Rows of P, of each of its groups."""
    outputs: int
    inverse_bytes: int
    velocity_bytes: int
    seconds: float
    """P∇W and the update of P, in one step."""
    rank: int
    """Who keeps it with ``shard=True``."""

    @property
    def state_bytes(self) -> int:
        """P and velocities."""
        return self.inverse_bytes + self.velocity_bytes


@dataclass(frozen=True)
class Plan:
    """What a network costs on a number of ranks."""

    layers: tuple[LayerPlan, ...]
    world_size: int
    batch: int
    """Images of all ranks together."""
    block_size: int | None
    machine: Machine
    parameter_bytes: int
    fallback_bytes: int
    """Velocities of all that momentum SGD trains."""
    mean_bytes: int
    """The mean inputs of a step."""

    @property
    def state_bytes(self) -> int:
        """Of the whole optimizer: what each rank keeps without sharding."""
        return self.fallback_bytes + sum(layer.state_bytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Of a step of the optimizer without sharding."""
        return sum(layer.seconds for layer in self.layers)

    def rank_bytes(self, rank: int) -> int:
        """What a rank keeps with sharding."""
        return self.fallback_bytes + sum(layer.state_bytes for layer in self.layers if layer.rank == rank)

    def rank_seconds(self, rank: int) -> float:
        """What a rank computes in a step with sharding."""
        return sum(layer.seconds for layer in self.layers if layer.rank == rank)

    @property
    def largest_rank_bytes(self) -> int:
        """What the rank that keeps most does, with sharding."""
        return max(map(self.rank_bytes, range(self.world_size)))

    @property
    def slowest_rank_seconds(self) -> float:
        """Of a step with sharding, without the messages."""
        return max(map(self.rank_seconds, range(self.world_size)))

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and the largest state of a rank, without activations."""
        state = self.largest_rank_bytes if self.world_size > 1 else self.state_bytes
        return 2 * self.parameter_bytes + state

    def sent_bytes(self) -> dict[str, int]:
        """What one rank sends in a step, by ring: for the gradients (plain DDP), the means, and the new weights."""
        ring = (self.world_size - 1) / self.world_size
        weights = sum(layer.velocity_bytes for layer in self.layers)
        return {
            "gradients": round(2 * ring * self.parameter_bytes),
            "means": round(2 * ring * self.mean_bytes),
            "weights": round(ring * weights),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain containers."""
        return {
            **asdict(self),
            "state_bytes": self.state_bytes,
            "seconds": self.seconds,
            "largest_rank_bytes": self.largest_rank_bytes,
            "slowest_rank_seconds": self.slowest_rank_seconds,
            "sent_bytes": self.sent_bytes(),
        }


def make_plan(
    model: nn.Module, world_size: int, batch: int, machine: Machine, block_size: int | None = None, cpu: bool = True
) -> Plan:
    """What RLS costs on a network, from its shapes: it may lie on the meta device.

    Args:
        model: The network.
        world_size: How many ranks.
        batch: Images in a batch of all ranks together.
        machine: How fast a rank is.
        block_size: As :class:`rlsprune.RLS` takes it.
        cpu: Whether ranks are CPUs, on which a single one has a cheaper way for small batches.
    """
    check_argument("world_size", world_size, world_size >= 1, "at least 1")
    check_argument("batch", batch, batch >= 1, "at least 1")
    check_argument("block_size", block_size, block_size is None or block_size >= 1, "None or at least 1")
    parts = divide(model)
    shapes = {name: layers[0].weight.shape for name, layers in parts.layers.items()}
    owners = balance([step_cost(shape[0], shape[1:].numel(), 1, block_size) for shape in shapes.values()], world_size)
    plans, means = [], 0
    for (name, shape), rank in zip(shapes.items(), owners, strict=True):
        layer = parts.layers[name][0]
        groups, inputs = getattr(layer, "groups", 1), shape[1:].numel()
        sizes = block_sizes(inputs, shape[2:].numel(), layer.bias is not None, block_size)
        entries = groups * sum(size * size for size in sizes)
        direct = shape[0] * sum(size * size for size in sizes)
        by_batch = batch * inputs * (inputs + shape[0])
        cheap = cpu and world_size == 1 and isinstance(layer, nn.Linear) and len(sizes) == 1
        multiplications = min(direct, by_batch) if cheap else direct
        plans.append(
            LayerPlan(
                name=name,
                inputs=sum(sizes),
                outputs=shape[0],
                inverse_bytes=_ITEM * entries,
                velocity_bytes=_ITEM * sum(p.numel() for p in layer.parameters(recurse=False)),
                seconds=machine.seconds(multiplications, 2 * _ITEM * entries),
                rank=rank,
            )
        )
        means += groups * sum(sizes) + 2
    return Plan(
        layers=tuple(plans),
        world_size=world_size,
        batch=batch,
        block_size=block_size,
        machine=machine,
        parameter_bytes=_ITEM * sum(p.numel() for p in model.parameters()),
        fallback_bytes=_ITEM * sum(p.numel() for _, p in parts.others),
        mean_bytes=_ITEM * means,
    )


def fitting_block_size(model: nn.Module, plan: Plan, memory: float) -> int | None:
    """The largest power of two as block size with which the training of a plan fits, or None if there is none."""
    widest = max(layer.inputs for layer in plan.layers)
    for exponent in range(widest.bit_length() - 1, 4, -1):
        size: int = 2**exponent
        if make_plan(model, plan.world_size, plan.batch, plan.machine, size).training_bytes <= memory:
            return size
    return None


def measure(device: str = "cpu", size: int = 2048) -> Machine:
    """The speeds of this machine: the best of a few matrix products, and of a few updates of a P."""
    P = torch.eye(size, device=device)
    gradient = torch.rand(size // 2, size, device=device)
    v = torch.rand(size, device=device) / size
    product = _best(lambda: gradient @ P, device)
    update = _best(lambda: P.addcmul_(v.unsqueeze(-1), v.unsqueeze(-2), value=-1), device)
    return Machine(
        gflops=2e-9 * gradient.shape[0] * size * size / product, gbytes=1e-9 * 2 * _ITEM * size * size / update
    )


def _best(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        wait_for(torch.device(device))
        times.append(time.perf_counter() - started)
    return min(times[1:])
