"""One optimizer step of preconditioned layers: prepared first, applied once all layers are known to be sound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsprune.model.tensors import is_sharded, local, tensors_in
from rlsprune.optim.checks import check_unresized
from rlsprune.optim.entries import InverseStep, initial_entry, inverse_step, kind, moved
from rlsprune.optim.faults import Check, Fault
from rlsprune.optim.functional import Matrices
from rlsprune.optim.packing import INVERSE, VELOCITY, State, joined, pack, velocity_of
from rlsprune.optim.sgd_step import step_parameters_

# With forgetting < 1, no direction of P grows past this multiple of p0. An input that is nearly always zero is hardly
# seen in the mean, so it drifts to the limit, and one active sample is then amplified by it: on MNIST's border pixels
# 10 diverges and 2 trains.
WIND_UP_LIMIT = 2.0
# The largest relative rounding of a step in the direction of the mean input. Beyond it a whole P turns indefinite
# within some thousand steps, and with P in factors the step is mostly rounding.
MOST_ROUNDED = 1 / 32
# Where -k·xᵀPx is above this, P is not positive definite and not merely rounded.
_INDEFINITE = 1e-3
# The most entries of the weight of a layer that is stepped together with others. A larger one keeps a device busy by
# itself, and joining such layers takes memory for all their gradients.
_MOST_JOINED = 2**20
# Settings of a parameter group that the step of its layer uses.
_SETTINGS = ("lr", "momentum", "forgetting", "mean_scale", "weight_decay", "p0")


class ReadyLayer(NamedTuple):
    """A layer whose gradient has arrived."""

    place: int
    """Place of its parameter group among all."""
    group: dict[str, Any]
    mean: Tensor
    """The mean input, ``(groups, n)``."""

    @classmethod
    def of(cls, place: int, group: dict[str, Any], mean: Tensor, state: State, rank: int | None) -> ReadyLayer:
        """Makes it from a layer's mean input. Starts the layer's P if there is none, and moves it along with the model.

        Raises:
            RuntimeError: The layer was resized.
        """
        weight = group["params"][0]
        mean = mean.to(weight.device)
        check_unresized(group, state)
        own = state[weight]
        own[INVERSE] = moved(own[INVERSE], mean) if INVERSE in own else initial_entry(mean, group["p0"], rank)
        return cls(place, group, mean)

    @property
    def weight(self) -> Tensor:
        """Returns the weight; a bias comes after it in the group."""
        weight: Tensor = self.group["params"][0]
        return weight


def equal_layers(layers: Iterable[ReadyLayer], state: State) -> list[list[list[ReadyLayer]]]:
    """Groups layers by step, and within a step by size. Layers of one step have the same settings and kind of P."""
    steps: dict[Any, dict[Any, list[ReadyLayer]]] = {}
    for layer in layers:
        entry = state[layer.weight][INVERSE]
        size: Any = id(layer.weight)  # alone: divided over processes, or large enough by itself
        most = max(part.numel() for part in (layer.weight, *tensors_in(entry)))
        if not is_sharded(layer.weight) and most <= _MOST_JOINED:
            size = tuple((p.shape, p.dtype, p.grad is None) for p in layer.group["params"])
        key = (layer.mean.dtype, layer.mean.device, *(layer.group[setting] for setting in _SETTINGS), *kind(entry))
        steps.setdefault((*key, size) if "P" in entry else key, {}).setdefault(size, []).append(layer)
    return [list(sizes.values()) for sizes in steps.values()]


@dataclass
class LayerStep:
    """The step of some layers, gathered by `prepare`, which changes no value.

    Several layers of equal size are stepped as one layer with the groups of all, in as many kernels as one layer takes.
    Their P lie in memory one after the other, and so do their velocities (`pack`).
    """

    sizes: list[list[ReadyLayer]]
    """The layers of each size."""
    inverse: InverseStep
    """P of the layers."""
    h: Tensor
    """h of Eq. (18), one per group."""
    checks: list[Check]
    """Checks that must pass before anything is changed."""

    @classmethod
    def prepare(cls, sizes: list[list[ReadyLayer]], state: State) -> LayerStep:
        """Computes the gains (Eqs. 17, 18)."""
        layers = [layer for same in sizes for layer in same]
        group, mean = layers[0].group, layers[0].mean
        inverse = inverse_step([[state[layer.weight][INVERSE] for layer in same] for same in sizes])
        means = [joined([layer.mean for layer in same]) for same in sizes]
        excitation, energy = inverse.look(means, group["mean_scale"])
        gradient = inverse.meet([_gradients(same) for same in sizes])
        found = torch.stack([energy, energy, -excitation, gradient.abs()])
        sound = (found < _bounds(mean.dtype, mean.device)).flatten()
        if len(mean) > 1:
            sound = sound.view(-1, len(mean)).all(1)
        faults = partial(_faults, [(layer.place, layer.group["name"]) for layer in layers], mean.dtype)
        return cls(sizes, inverse, group["forgetting"] + excitation, [(faults, sound)])

    @property
    def device(self) -> torch.device:
        """Returns the device of the layers."""
        return self.sizes[0][0].mean.device

    def apply(self, state: State, gate: Tensor | None) -> None:
        """Applies Eqs. (21) and (22) with P_{t-1}, then Eq. (16).

        Args:
            state: The optimizer's state, for the velocities.
            gate: None, or a 0-dim bool on the device: where it is False, everything stays as it was.
        """
        group, dtype = self.sizes[0][0].group, self.sizes[0][0].mean.dtype
        parameters = [_by_kind(layers) for layers in self.sizes]
        velocities = [[_velocity(state, same, dtype) for same in every] for every in parameters]
        # A number that is not finite stays so even times zero: velocities are restored afterwards, not masked before.
        before = [] if gate is None else [velocity.clone() for every in velocities for velocity in every]
        matrices = [_matrices(*own) for own in zip(self.sizes, velocities, strict=True)]
        self.inverse.velocity_step_(matrices, group["momentum"], group["lr"] / self.h)
        trained: list[Tensor] = []
        moves: list[Tensor] = []
        for same, velocity in zip(chain(*parameters), chain(*velocities), strict=True):
            if gate is not None:
                velocity.copy_(torch.where(gate, velocity, before.pop(0)))
            if same[0].grad is None:  # frozen: it keeps no velocity
                velocity.zero_()
            else:
                trained += [local(p) for p in same]
                moves += [velocity] if len(same) == 1 else torch.split(velocity, velocity.shape[0] // len(same))
        step_parameters_(trained, moves, group["lr"] * group["weight_decay"], gate)
        self.inverse.update_(group["forgetting"], group["p0"] * WIND_UP_LIMIT, gate)


@cache
def _bounds(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the bounds of the checked values, in the order of `_faults`; beyond the second, P cannot be resolved."""
    bounds = [math.inf, MOST_ROUNDED / torch.finfo(dtype).eps, _INDEFINITE, math.inf]
    return torch.tensor(bounds, dtype=dtype, device=device).unsqueeze(1)


def _faults(layers: list[tuple[int, str]], dtype: torch.dtype) -> list[Fault]:
    """Lists the possible faults of equal layers, in the order of the checks: an earlier fault causes the later ones."""
    return [
        (place, f"{fault} layer {name!r}")
        for fault in (
            "not finite: the input of",
            f"too large for P in {dtype} (scale the inputs, or give RLS dtype=torch.float64): the input of",
            "not positive definite: P of",
            "not finite: the gradient of",
        )
        for place, name in layers
    ]


def _by_kind(layers: list[ReadyLayer]) -> list[tuple[Tensor, ...]]:
    """Returns the weights of some layers, and their biases if they have any."""
    return list(zip(*(layer.group["params"] for layer in layers), strict=True))


def _gradients(layers: list[ReadyLayer]) -> Matrices:
    """Returns the gradients of layers of equal size, in the dtype of P; zero for a frozen parameter."""
    dtype = layers[0].mean.dtype
    parts = [
        [torch.zeros_like(local(p), dtype=dtype) if p.grad is None else local(p.grad).to(dtype) for p in same]
        for same in _by_kind(layers)
    ]
    return _matrices(layers, [joined(same) for same in parts])


def _velocity(state: State, same: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Returns the velocities of parameters of equal size as one tensor."""
    for p in same:
        velocity_of(state, p, dtype)
    return local(pack([state[p] for p in same], VELOCITY))


def _matrices(layers: list[ReadyLayer], tensors: list[Tensor]) -> Matrices:
    """Shapes a weight as ``(groups, out per group, inputs)``, a bias as ``(groups, out per group)``; out may be 0."""
    groups, inputs = len(layers) * len(layers[0].mean), layers[0].weight.shape[1:].numel()
    weight = tensors[0].reshape(groups, tensors[0].shape[0] // groups, inputs)
    return weight, tensors[1].view(groups, -1) if len(tensors) > 1 else None
