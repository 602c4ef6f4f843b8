"""Momentum SGD for the parameters that are not preconditioned: all of a kind in a few kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsprune.model.tensors import all_finite, local
from rlsprune.optim.faults import Check
from rlsprune.optim.packing import State, joined, velocity_of


@dataclass
class SGDStep:
    """A step of parameters of one group, device and dtype."""

    place: int
    """Place of the group among all."""
    group: dict[str, Any]
    lr: float
    parameters: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def prepare(cls, place: int, group: dict[str, Any], parameters: Iterable[Tensor], lr: float) -> list[SGDStep]:
        """Returns the steps of a group's parameters, all of which have a gradient."""
        steps: dict[Any, SGDStep] = {}
        for p in parameters:
            step = steps.setdefault((p.device, p.dtype), cls(place, group, lr, [], []))
            step.parameters.append(p)
            if p.grad is None or p.grad.is_sparse:
                name = group.get("name")
                raise ValueError(f"group {name!r} has a sparse gradient: create the embedding with sparse=False")
            step.gradients.append(local(p.grad))
        return list(steps.values())

    @property
    def device(self) -> torch.device:
        """Returns the device of the parameters."""
        return self.parameters[0].device

    @property
    def checks(self) -> list[Check]:
        """Returns the checks that must pass before anything is changed."""
        what = (self.place, f"not finite: the gradient in group {self.group.get('name')!r}")
        return [(lambda: [what] * len(self.parameters), all_finite(self.gradients))]

    def apply(self, state: State, gate: Tensor | None) -> None:
        """Computes ``Ψ ← α·Ψ − η·∇W`` and ``W ← W + Ψ``.

        Args:
            state: The optimizer's state, for the velocities.
            gate: None, or a 0-dim bool on the device: where it is False, everything stays as it was.
        """
        velocities = [local(velocity_of(state, p, p.dtype)) for p in self.parameters]
        gradients, momentum = self.gradients, self.group["momentum"]
        if gate is not None:
            gradients, momentum = _gated(gradients, gate), _factor(momentum, gate, velocities[0].dtype)
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients, alpha=-self.lr)
        parameters = [local(p) for p in self.parameters]
        step_parameters_(parameters, velocities, self.lr * self.group["weight_decay"], gate)


def step_parameters_(parameters: list[Tensor], moves: list[Tensor], decay: float, gate: Tensor | None) -> None:
    """Computes Eq. (22), ``W ← W + Ψ``, after decoupled weight decay."""
    if gate is not None:
        moves = _gated(moves, gate)
    if decay:
        factor: Any = 1 - decay if gate is None else _factor(1 - decay, gate, parameters[0].dtype)
        torch._foreach_mul_(parameters, factor)
    torch._foreach_add_(parameters, moves)


def _factor(value: float, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the value, or 1 if the gate is closed. ``torch.where`` of two plain numbers would give a float32."""
    return torch.where(gate, torch.full((), value, dtype=dtype, device=gate.device), 1.0)


def _gated(tensors: list[Tensor], gate: Tensor) -> list[Tensor]:
    """Returns the tensors, or zeros if the gate is closed, in two kernels."""
    flat = torch.where(gate, joined([tensor.flatten() for tensor in tensors]), 0)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
