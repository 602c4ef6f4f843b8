"""One optimizer step of one preconditioned layer: prepared first, applied once all layers are known to be sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsprune._tensors import local
from rlsprune.optim import functional

# Entries of `optimizer.state[parameter]`, always checkpointed.
INVERSE = "inverse"  # of a weight: P as a list of diagonal blocks, each (groups, b, b)
VELOCITY = "velocity"  # of any parameter: Ψ, of its shape

# With forgetting < 1, no diagonal entry of P grows past this multiple of p0. An input that is nearly always zero is
# hardly seen in the mean, so it drifts to the limit, and one active sample is then amplified by it: on MNIST's border
# pixels 10 diverges and 2 trains.
WIND_UP_LIMIT = 2.0
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


def initial_inverse(mean: Tensor, weight: Tensor, p0: float, block_size: int | None) -> list[Tensor]:
    """``p0·I``, in blocks, for a layer with this mean input ``(groups, n)``."""
    inputs = weight.shape[1:].numel()
    sizes = block_sizes(inputs, weight.shape[2:].numel(), mean.shape[-1] > inputs, block_size)
    return [p0 * torch.eye(b, dtype=mean.dtype, device=mean.device).expand(len(mean), b, b).contiguous() for b in sizes]


@dataclass
class LayerStep:
    """What a layer's step needs: gathered by :meth:`prepare`, which changes nothing."""

    group: dict[str, Any]
    weight: Tensor
    bias: Tensor | None
    blocks: list[Tensor]
    """P, one ``(groups, b, b)`` matrix per block."""
    gains: list[Tensor]
    """``u = P x`` per block."""
    excitations: list[Tensor]
    """``xᵀ P x`` per block, one per group."""
    factors: tuple[Tensor, tuple[Tensor, Tensor | None]] | None
    """``Δᵀ`` and ``X P``, where that way is the cheaper one; None for the direct way."""
    checks: dict[str, Tensor]
    """What must hold before anything is changed: from what to check to a 0-dim bool on the device."""

    @classmethod
    def prepare(
        cls,
        group: dict[str, Any],
        weight: Tensor,
        bias: Tensor | None,
        blocks: list[Tensor],
        mean: Tensor,
        batch: tuple[Tensor, Tensor] | None,
        probe: Tensor | None,
    ) -> LayerStep:
        """Computes the gains (Eqs. 17, 18), and decides which of the two ways of computing P∇W is taken."""
        factors = None
        if batch is not None and probe is not None:
            batch, finite = match_gradient(weight, bias, *batch, probe)
        else:
            finite = all_finite([local(p.grad) for p in (weight, bias) if p is not None and p.grad is not None])
        if batch is not None:
            factors = functional.batch_factors(*batch, blocks[0])
            gains = [functional.mean_product(factors[1])]
            excitations = [(mean * gains[0]).sum(-1)]
        else:
            parts = torch.split(mean, [P.shape[-1] for P in blocks], dim=-1)
            gains, excitations = map(list, zip(*map(functional.gain, blocks, parts), strict=True))
        h = group["forgetting"] + group["mean_scale"] * torch.stack(excitations)
        checks = {
            "the input": mean.abs().amax() < torch.inf,
            "the gradient": finite,
            "P (not positive definite)": ((h > 0) & (h < torch.inf)).all(),
        }
        return cls(group, weight, bias, blocks, gains, excitations, factors, checks)

    def apply(self, state: Mapping[Tensor, dict[str, Any]], gate: Tensor | None) -> None:
        """Eqs. (21), (22) with P_{t-1}, then Eq. (16).

        Args:
            state: The optimizer's state, for the velocities.
            gate: None, or a 0-dim bool on the device: where it is False, everything stays as it was.
        """
        group = self.group
        lr = group["lr"]
        h = group["forgetting"] + group["mean_scale"] * sum(self.excitations)
        parameters = [p for p in (self.weight, self.bias) if p is not None]
        # What is not finite spoils what it is multiplied with, even by zero: velocities are put back, not spared.
        before = [] if gate is None else [local(state[p][VELOCITY]).clone() for p in parameters]
        self._move_velocities(state, group["momentum"], lr / h)
        for p, old in zip(parameters, before, strict=False):
            velocity = local(state[p][VELOCITY])
            velocity.copy_(torch.where(gate, velocity, old))  # type: ignore[arg-type]  # there is a gate
        for p in parameters:
            if p.grad is None:  # frozen: it gathers no speed
                state[p][VELOCITY].zero_()
            else:
                step_parameter_(local(p), local(state[p][VELOCITY]), lr * group["weight_decay"], gate)
        for P, u, excitation in zip(self.blocks, self.gains, self.excitations, strict=True):
            self._update_inverse(P, u, group["forgetting"] + group["mean_scale"] * excitation, gate)

    def _move_velocities(self, state: Mapping[Tensor, dict[str, Any]], momentum: float, scale: Tensor) -> None:
        groups, n = len(self.blocks[0]), self.weight.shape[1:].numel()
        velocity = _rows(local(state[self.weight][VELOCITY]), groups, n)
        bias_velocity = None if self.bias is None else local(state[self.bias][VELOCITY]).view(groups, -1)
        if self.factors is not None:
            functional.velocity_step_(velocity, bias_velocity, *self.factors, momentum=momentum, scale=scale)
            return
        dtype = self.blocks[0].dtype
        weight_grad = _rows(_grad(self.weight).to(dtype), groups, n)
        bias_grad = None if self.bias is None else _grad(self.bias).to(dtype).reshape(groups, -1)
        start = 0
        for P in self.blocks:
            end = min(start + P.shape[-1], n)
            has_bias = P.shape[-1] > end - start
            left, right = functional.direct_factors(weight_grad[..., start:end], bias_grad if has_bias else None, P)
            functional.velocity_step_(
                velocity[..., start:end],
                bias_velocity if has_bias else None,
                left,
                right,
                momentum=momentum,
                scale=scale,
            )
            start = end

    def _update_inverse(self, P: Tensor, u: Tensor, h: Tensor, gate: Tensor | None) -> None:
        group = self.group
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


def step_parameter_(parameter: Tensor, velocity: Tensor, decay: float | Tensor, gate: Tensor | None) -> None:
    """Eq. (22), ``W ← W + Ψ``, after decoupled weight decay."""
    if gate is None:
        if decay:
            parameter.mul_(1 - decay)
        parameter.add_(velocity)
    else:
        parameter.mul_(torch.where(gate, 1 - decay, 1.0)).add_(torch.where(gate, velocity, 0))


def _grad(parameter: Tensor) -> Tensor:
    """The gradient; zero for a frozen parameter of a layer that is otherwise trained."""
    return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)


def _rows(weight: Tensor, groups: int, inputs: int) -> Tensor:
    """A weight, or what has its shape, as matrices: ``(groups, out per group, inputs)``, of which out may be 0."""
    return weight.reshape(groups, len(weight) // groups, inputs)


def all_finite(gradients: list[Tensor]) -> Tensor:
    """Whether all entries are finite, as a 0-dim bool: one NaN or infinity makes its tensor's sum one."""
    # In half precision the sum of finite numbers may not be finite.
    sums = [gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    return torch.stack(sums).isfinite().all()


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
        X and the scaled Δ, or None if the gradient is another one; and whether the gradient is finite.
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
