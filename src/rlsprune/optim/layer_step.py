"""One optimizer step of preconditioned layers: prepared first, applied once all layers are known to be sound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsprune.model.tensors import all_finite, is_sharded, local
from rlsprune.optim import functional
from rlsprune.optim.faults import Check
from rlsprune.optim.packing import INVERSE, VELOCITY, State, joined, pack, velocity_of
from rlsprune.optim.sgd_step import step_parameters_

# With forgetting < 1, no diagonal entry of P grows past this multiple of p0. An input that is nearly always zero is
# hardly seen in the mean, so it drifts to the limit, and one active sample is then amplified by it: on MNIST's border
# pixels 10 diverges and 2 trains.
WIND_UP_LIMIT = 2.0
# The most entries of P, or of the weight, of a layer that is stepped together with others. A larger one keeps a device
# busy by itself, and joining such layers takes memory for all their gradients.
_MOST_JOINED = 2**20
# What a parameter group says about the step of its layer.
_SETTINGS = ("lr", "momentum", "forgetting", "mean_scale", "weight_decay", "p0")
# A gradient is taken for Δᵀ X, up to a factor, if it agrees with it within this many roundings of the sum's terms.
_PROBE_ROUNDINGS = 8


def block_sizes(inputs: int, unit: int, bias: bool, block_size: int | None) -> list[int]:
    """Sizes of P's diagonal blocks: as even as possible, in whole channels of ``unit`` inputs, the bias in the last."""
    channels = inputs // unit
    per_block = channels if block_size is None else max(1, block_size // unit)
    count = max(1, -(-channels // per_block))
    sizes = [unit * (channels // count + (i < channels % count)) for i in range(count)]
    sizes[-1] += bias
    return sizes


def initial_blocks(mean: Tensor, weight: Tensor, p0: float, block_size: int | None) -> list[Tensor]:
    """``p0·I``, in blocks, for a layer with this mean input ``(groups, n)``."""
    inputs = weight.shape[1:].numel()
    sizes = block_sizes(inputs, weight.shape[2:].numel(), mean.shape[-1] > inputs, block_size)
    return [functional.initial_inverse(part, p0) for part in torch.split(mean, sizes, dim=-1)]


@dataclass(frozen=True)
class ReadyLayer:
    """A layer whose gradient has arrived."""

    place: int
    """Of its parameter group among all."""
    group: dict[str, Any]
    weight: Tensor
    bias: Tensor | None
    mean: Tensor
    """The mean input, ``(groups, n)``."""
    batch: tuple[Tensor, Tensor, Tensor] | None
    """Where ``Δᵀ(X P)`` is the cheaper way: X, Δ, and a probe for :func:`match_gradient`."""

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def equal_layers(layers: Iterable[ReadyLayer], state: State) -> list[list[ReadyLayer]]:
    """The layers in lists of which each can be stepped as one: the same sizes, kinds of tensors and settings."""
    lists: dict[Any, list[ReadyLayer]] = {}
    for layer in layers:
        kind: Any = id(layer.weight)  # a batch of its own, rows that other processes have, or large enough by itself
        size = layer.mean.shape[-1] * max(layer.mean.shape[-1], len(layer.weight))
        if layer.batch is None and not is_sharded(layer.weight) and size <= _MOST_JOINED:
            tensors = [(p.shape, p.dtype, p.device, p.grad is None) for p in layer.parameters]
            settings = [layer.group[key] for key in _SETTINGS]
            blocks = [(P.shape, P.dtype) for P in state[layer.weight][INVERSE]]
            kind = (*tensors, *settings, *blocks)
        lists.setdefault(kind, []).append(layer)
    return list(lists.values())


@dataclass
class LayerStep:
    """What the step of a layer needs: gathered by :meth:`prepare`, which changes no value.

    Several layers of equal size are stepped as one layer with the groups of all, in as many kernels as one layer takes.
    Their P lie in memory one after the other, and so do their velocities (:func:`pack`).
    """

    layers: list[ReadyLayer]
    blocks: list[Tensor]
    """P, one ``(groups, b, b)`` matrix per block."""
    gains: list[Tensor]
    """``u = P x`` per block."""
    excitations: list[Tensor]
    """``xᵀ P x`` per block, one per group."""
    factors: tuple[Tensor, tuple[Tensor, Tensor | None]] | None
    """``Δᵀ`` and ``X P``, where that way is the cheaper one; None for the direct way."""
    checks: list[Check]
    """What must hold before anything is changed."""

    @classmethod
    def prepare(cls, layers: list[ReadyLayer], state: State) -> LayerStep:
        """Computes the gains (Eqs. 17, 18), and decides which of the two ways of computing P∇W is taken."""
        first = layers[0]
        count = len(state[first.weight][INVERSE])
        blocks = [pack([(state[layer.weight][INVERSE], number) for layer in layers]) for number in range(count)]
        mean = joined([layer.mean for layer in layers])
        batch = factors = None
        if first.batch is not None:
            batch, finite = match_gradient(first.weight, first.bias, *first.batch)
        else:
            finite = all_finite([local(p.grad) for layer in layers for p in layer.parameters if p.grad is not None])
        if batch is not None:
            factors = functional.batch_factors(*batch, blocks[0])
            gains = [functional.mean_product(factors[1])]
            excitations = [(mean * gains[0]).sum(-1)]
        else:
            parts = torch.split(mean, [P.shape[-1] for P in blocks], dim=-1)
            gains, excitations = map(list, zip(*map(functional.gain, blocks, parts), strict=True))
        h = first.group["forgetting"] + first.group["mean_scale"] * torch.stack(excitations, dim=-1)
        checks = [
            _check("the input", layers, mean.abs() < torch.inf),
            _check("the gradient", layers, finite),
            _check("P (not positive definite)", layers, (h > 0) & (h < torch.inf)),
        ]
        return cls(layers, blocks, gains, excitations, factors, checks)

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.blocks[0].device

    def apply(self, state: State, gate: Tensor | None) -> None:
        """Eqs. (21), (22) with P_{t-1}, then Eq. (16).

        Args:
            state: The optimizer's state, for the velocities.
            gate: None, or a 0-dim bool on the device: where it is False, everything stays as it was.
        """
        group = self.layers[0].group
        lr = group["lr"]
        h = group["forgetting"] + group["mean_scale"] * sum(self.excitations)
        parameters = list(zip(*(layer.parameters for layer in self.layers), strict=True))
        for same in parameters:
            for p in same:
                velocity_of(state, p, self.blocks[0].dtype)
        velocities = [local(pack([(state[p], VELOCITY) for p in same])) for same in parameters]
        # What is not finite spoils what it is multiplied with, even by zero: velocities are put back, not spared.
        before = [] if gate is None else [velocity.clone() for velocity in velocities]
        self._move(velocities, group["momentum"], lr / h)
        for velocity, old in zip(velocities, before, strict=False):
            velocity.copy_(torch.where(gate, velocity, old))  # type: ignore[arg-type]  # there is a gate
        for same, velocity in zip(parameters, velocities, strict=True):
            if same[0].grad is None:  # frozen: it gathers no speed
                velocity.zero_()
            else:
                moves = torch.split(velocity, len(velocity) // len(same))
                step_parameters_([local(p) for p in same], list(moves), lr * group["weight_decay"], gate)
        for P, u, excitation in zip(self.blocks, self.gains, self.excitations, strict=True):
            self._update_inverse(P, u, group["forgetting"] + group["mean_scale"] * excitation, gate)

    def _move(self, velocities: list[Tensor], momentum: float, scale: Tensor) -> None:
        """Eq. (21) for the velocities of weight and bias."""
        groups, n = len(self.blocks[0]), self.layers[0].weight.shape[1:].numel()
        velocity = _rows(velocities[0], groups, n)
        bias_velocity = velocities[1].view(groups, -1) if len(velocities) > 1 else None
        if self.factors is not None:
            functional.velocity_step_(velocity, bias_velocity, *self.factors, momentum=momentum, scale=scale)
            return
        gradient = self._gradient(groups, n)
        start = 0
        for P in self.blocks:
            end = start + P.shape[-1]
            functional.velocity_step_(
                velocity[..., start : min(end, n)],
                bias_velocity if end > n else None,
                *functional.direct_factors(gradient[..., start:end], P, bias=end > n),
                momentum=momentum,
                scale=scale,
            )
            start = end

    def _gradient(self, groups: int, n: int) -> Tensor:
        """``[∇W ∇b]``, ``(groups, out per group, inputs)``."""
        dtype = self.blocks[0].dtype
        weights = _rows(joined([_grad(layer.weight).to(dtype) for layer in self.layers]), groups, n)
        biases = [_grad(layer.bias).to(dtype) for layer in self.layers if layer.bias is not None]
        return torch.cat([weights, joined(biases).view(groups, -1, 1)], dim=-1) if biases else weights

    def _update_inverse(self, P: Tensor, u: Tensor, h: Tensor, gate: Tensor | None) -> None:
        group = self.layers[0].group
        forgetting, limit = group["forgetting"], group["p0"] * WIND_UP_LIMIT
        if gate is None:
            functional.rank_one_downdate_(P, u, h, mean_scale=group["mean_scale"], forgetting=forgetting, limit=limit)
            return
        before = P.clone() if forgetting != 1 else None
        functional.rank_one_downdate_(
            P,
            torch.where(gate, u, 0),
            torch.where(gate, h, 1),
            mean_scale=group["mean_scale"],
            forgetting=forgetting,
            limit=limit,
        )
        if before is not None:
            P.copy_(torch.where(gate, P, before))


def _grad(parameter: Tensor) -> Tensor:
    """The gradient; zero for a frozen parameter of a layer that is otherwise trained."""
    return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)


def _rows(weight: Tensor, groups: int, inputs: int) -> Tensor:
    """A weight, or what has its shape, as matrices: ``(groups, out per group, inputs)``, of which out may be 0."""
    return weight.reshape(groups, len(weight) // groups, inputs)


def _check(what: str, layers: list[ReadyLayer], holds: Tensor) -> Check:
    """One flag per layer, from as many for each of them."""
    names = [(layer.place, f"{what} of layer {layer.group['name']!r}") for layer in layers]
    return names, holds.view(len(layers), -1).all(1)


def match_gradient(
    weight: Tensor, bias: Tensor | None, inputs: Tensor, deltas: Tensor, probe: Tensor
) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
    """Whether ``.grad`` still is ``s·Δᵀ X`` for some factor s, seen through one random vector.

    Between backward and step a user may clip, unscale, average, mask or otherwise edit gradients, in ways that leave no
    mark on the tensor. A common factor keeps the batch useful: ``(s·Δ)ᵀ X``. Anything else means the direct way.

    Args:
        weight: The layer's weight.
        bias: Its bias, or None.
        inputs: X.
        deltas: Δ.
        probe: A random vector, one entry per input and a last one for the bias.

    Returns:
        X and the scaled Δ, or None if the gradient is another one; and whether it is finite: one flag for all of it, or
        one for each parameter.
    """
    n = inputs.shape[-1]
    if weight.grad is None or (bias is not None and bias.grad is None):
        return None, all_finite([p.grad for p in (weight, bias) if p is not None and p.grad is not None])
    actual = weight.grad @ probe[:n]
    projected, magnitude = inputs @ probe[:n], inputs.abs() @ probe[:n].abs()
    if bias is not None and bias.grad is not None:
        actual = actual + bias.grad * probe[n]
        projected, magnitude = projected + probe[n], magnitude + probe[n].abs()
    expected = deltas.t() @ projected
    factor = (actual @ expected) / (expected @ expected)
    tolerance = _PROBE_ROUNDINGS * torch.finfo(weight.dtype).eps * (deltas.abs().t() @ magnitude) * factor.abs()
    same = ((actual - factor * expected).abs() <= tolerance).all()
    return ((inputs, deltas * factor) if same else None), actual.abs().amax() < torch.inf
