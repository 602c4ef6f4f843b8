"""What P costs per layer and per rank, by shapes alone and two measured speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rlsprune.model.arguments import check_argument
from rlsprune.model.tensors import wait_for
from rlsprune.optim.entries import capacity, entry_bytes, in_factors
from rlsprune.optim.layers import divide

__all__ = ["CostPlan", "LayerPlan", "Machine", "make_plan", "measure"]

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Machine:
    """How fast one rank is."""

    gflops: float
    """The speed of a large matrix product, in 10⁹ floating-point operations a second."""
    gbytes: float
    """Moved by the rank-one update of a large P, in 10⁹ bytes a second."""

    def seconds(self, multiplications: float, moved: float) -> float:
        """The time of this many multiplications with their additions, and this many bytes moved."""
        return 2e-9 * multiplications / self.gflops + 1e-9 * moved / self.gbytes


@dataclass(frozen=True)
class LayerPlan:
    """What one layer costs."""

    name: str
    inputs: int
    """The inputs of each of its groups, with the bias."""
    outputs: int
    inverse_bytes: int
    velocity_bytes: int
    seconds: float
    """P∇W and the update of P, in one step."""


@dataclass(frozen=True)
class CostPlan:
    """What a network costs on a number of ranks, each of which keeps all of it."""

    layers: tuple[LayerPlan, ...]
    world_size: int
    batch: int
    """Images of all ranks together."""
    rank: int | None
    machine: Machine
    parameter_bytes: int
    fallback_bytes: int
    """Velocities of all that momentum SGD trains."""
    mean_bytes: int
    """The mean inputs of a step."""

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer's state on every rank."""
        return self.fallback_bytes + sum(layer.inverse_bytes + layer.velocity_bytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """What a step of the optimizer takes beyond momentum SGD, on every rank."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and state of a rank, without activations."""
        return 2 * self.parameter_bytes + self.state_bytes

    def sent_bytes(self) -> dict[str, int]:
        """What one rank sends in a step, by ring: for the gradients (plain DDP), and for the mean inputs."""
        ring = 2 * (self.world_size - 1) / self.world_size
        return {"gradients": round(ring * self.parameter_bytes), "means": round(ring * self.mean_bytes)}

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain containers."""
        derived = {"state_bytes": self.state_bytes, "seconds": self.seconds, "sent_bytes": self.sent_bytes()}
        return asdict(self) | derived


def make_plan(model: nn.Module, world_size: int, batch: int, machine: Machine, rank: int | None = 16) -> CostPlan:
    """What RLS costs on a network, from its shapes: it may lie on the meta device.

    Args:
        model: The network.
        world_size: How many ranks.
        batch: Images in a batch of all ranks together.
        machine: How fast a rank is.
        rank: As :class:`rlsprune.RLS` takes it.
    """
    check_argument("world_size", world_size, world_size >= 1, "at least 1")
    check_argument("batch", batch, batch >= 1, "at least 1")
    check_argument("rank", rank, rank is None or rank >= 1, "None or at least 1")
    parts = divide(model)
    plans, means = [], 0
    for name, layers in parts.layers.items():
        layer, weight = layers[0], layers[0].weight
        groups, inputs = getattr(layer, "groups", 1), weight.shape[1:].numel() + (layer.bias is not None)
        plans.append(
            LayerPlan(
                name=name,
                inputs=inputs,
                outputs=len(weight),
                inverse_bytes=groups * entry_bytes(inputs, rank),
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
        parameter_bytes=_ITEM * sum(p.numel() for p in model.parameters()),
        fallback_bytes=_ITEM * sum(p.numel() for _, p in parts.others),
        mean_bytes=_ITEM * means,
    )


def _work(groups: int, inputs: int, outputs: int, rank: int | None) -> tuple[float, float]:
    """The multiplications of a layer's step, and the bytes that it moves, beyond those of momentum SGD."""
    if rank is None or not in_factors(inputs, rank):
        return outputs * inputs**2, 2 * _ITEM * groups * inputs**2
    rows = (rank + 1 + capacity(rank)) / 2  # between two compressions
    # ∇W Zᵀ reads the gradient, its product with Z reads and writes the velocity; Z and Cx read C, which is small.
    moved = 3 * _ITEM * outputs * inputs + 4 * _ITEM * groups * rows * inputs
    return 2 * outputs * inputs * rows + groups * inputs * rows**2, moved


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
