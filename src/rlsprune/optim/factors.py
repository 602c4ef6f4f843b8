"""P in factors: ``P⁻¹ = β(I + CᵀC)`` with few rows in C, as functions on plain tensors.

Eq. (16) for ``P⁻¹`` is ``β ← λβ`` and one more row ``√(k/β)·x`` in C. With ``M = I + CCᵀ = LLᵀ`` and ``Z = L⁻¹C``,

    P = (I − ZᵀZ)/β,    xᵀPx = (xᵀx − |L⁻¹Cx|²)/β,    ∇W P = (∇W − (∇W Zᵀ)Z)/β.

Nothing n×n is formed, and P is positive definite whatever is rounded. When C is full its strongest directions stay, and
the energy of the others goes to β.

Shapes: C ``(G, m, n)``, M ``(G, m, m)`` and β ``(G,)``, both in float64 where the device has it.
Nothing here but :func:`compress` makes the host wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """The dtype of the small matrices: float64, but on Metal, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def initial_factors(x: Tensor, p0: float, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """C, M and β of ``P = p0·I`` for a layer with this mean input ``(G, n)``, with room for so many rows."""
    groups, n = x.shape
    M = torch.eye(capacity, dtype=wide(x.device), device=x.device).repeat(groups, 1, 1)
    return x.new_zeros(groups, capacity, n), M, M.new_full((groups,), 1 / p0)


def gram(C: Tensor) -> Tensor:
    """``M = I + CCᵀ``."""
    rows = C.to(wide(C.device))
    return torch.eye(C.shape[-2], dtype=rows.dtype, device=C.device) + rows @ rows.mT


def whitening(M: Tensor) -> tuple[Tensor, Tensor]:
    """``L⁻¹`` for ``LLᵀ = M``, and whether it could be computed, one flag per group."""
    factor, info = torch.linalg.cholesky_ex(M)
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False), info == 0


def products(C: Tensor, x: Tensor) -> Tensor:
    """``Cx``, ``(G, m)``, in the dtype of the small matrices."""
    dtype = wide(C.device)
    return (C.to(dtype) @ x.to(dtype).unsqueeze(-1)).squeeze(-1)


def excitation(whitener: Tensor, Cx: Tensor, square: Tensor, beta: Tensor) -> Tensor:
    """``xᵀPx`` of Eq. (18), from ``L⁻¹``, ``Cx``, ``xᵀx`` and β."""
    return (square - (whitener @ Cx.unsqueeze(-1)).square().sum((-2, -1))) / beta


def thin_product(Z: Tensor, gradient: Tensor, bias_gradient: Tensor | None) -> Tensor:
    """``Z∇ᵀ``, ``(G, m, out)``.

    Args:
        Z: ``(G, m, n)``, one column more with a bias.
        gradient: ∇W, ``(G, out, n)``.
        bias_gradient: ∇b, ``(G, out)``, or None.
    """
    if bias_gradient is None:
        return Z @ gradient.mT
    return (Z[..., :-1] @ gradient.mT).addcmul_(Z[..., -1:], bias_gradient.unsqueeze(-2))


def velocity_step_(
    weight_velocity: Tensor,
    bias_velocity: Tensor | None,
    gradient: Tensor,
    bias_gradient: Tensor | None,
    Z: Tensor,
    thin: Tensor,
    *,
    momentum: float,
    scale: Tensor,
) -> None:
    """Eq. (21) in place: ``Ψ ← α·Ψ − s·(∇ − (Z∇ᵀ)ᵀZ)``.

    Args:
        weight_velocity: Ψ of the weight, ``(G, out, n)``.
        bias_velocity: Ψ of the bias, ``(G, out)``, or None.
        gradient: ∇W, ``(G, out, n)``.
        bias_gradient: ∇b, ``(G, out)``, or None.
        Z: ``(G, m, n)``, one column more with a bias.
        thin: ``Z∇ᵀ``.
        momentum: α.
        scale: ``s = η/(hβ)`` per group.
    """
    each = scale[:, None, None]
    left = (thin * each).mT
    if bias_velocity is not None and bias_gradient is not None:
        bias_velocity.mul_(momentum).add_((left @ Z[..., -1:]).squeeze(-1)).addcmul_(
            bias_gradient, each[..., 0], value=-1
        )
        Z = Z[..., :-1]
    weight_velocity.baddbmm_(left, Z, beta=momentum).addcmul_(gradient, each, value=-1)


def forget(beta: Tensor, forgetting: float, limit: float) -> tuple[Tensor, Tensor]:
    """``β ← λβ``, but not below ``1/limit``, and the factor of CᵀC that makes up for it.

    A direction that is never excited keeps ``P = 1/β``, which plain forgetting lets grow without end (wind-up). At the
    floor C shrinks instead: ``λβ·CᵀC = β_floor·(λβ/β_floor)·CᵀC``.
    """
    wanted = beta * forgetting
    kept = wanted.clamp_min(1 / limit)
    return kept, wanted / kept


def compress(C: Tensor, beta: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` strongest directions of C, ``(G, rank, n)``, their energies ``(G, rank)`` (CCᵀ is diagonal), and β.

    The energy τ that each of the other n − rank directions has lost on average goes to β, so that P⁻¹ keeps its trace:
    ``I + CᵀC + τ(I − QᵀQ) = (1 + τ)(I + (CᵀC − τQᵀQ)/(1 + τ))``, with the kept directions in Q. Else a direction
    that is dropped every time would never accumulate, and P would stay too large there.

    Makes the host wait for the device once.
    """
    rows = C.to(wide(C.device))
    energies, directions = torch.linalg.eigh(rows @ rows.mT)
    energies, directions = energies.clamp_min(0).flip(-1), directions.flip(-1)[..., :rank]
    # Eigenvectors have no sign of their own, and ranks with other libraries shall come to the same C.
    largest = directions.gather(-2, directions.abs().argmax(-2, keepdim=True))
    kept = energies[..., :rank]
    lost = (energies[..., rank:].sum(-1) / max(1, C.shape[-1] - rank)).unsqueeze(-1)
    left = (kept - lost).clamp_min(0) / (1 + lost)
    tiny = torch.finfo(kept.dtype).tiny
    shrunk = (directions * largest.sign()).mT @ rows * (left / kept.clamp_min(tiny)).sqrt().unsqueeze(-1)
    return shrunk.to(C), left, beta * (1 + lost.squeeze(-1))
