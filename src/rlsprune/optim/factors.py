"""P in factors: ``P⁻¹ = β(I + CᵀC)`` with few rows in C, as functions on plain tensors.

Eq. (16) for ``P⁻¹`` is ``β ← λβ`` and one more row ``√(k/β)·x`` in C. With ``I + CCᵀ = LLᵀ``, ``T = L⁻¹`` and
``Z = TC``,

    P = (I − ZᵀZ)/β,    xᵀPx = (xᵀx − |TCx|²)/β,    ∇W P = (∇W − (∇W Zᵀ)Z)/β.

A new row of C adds a row to T, computed from the terms of ``xᵀPx``: no matrix is factorised in a step. No n×n matrix is
formed, and P is positive definite despite rounding. When C is full, its strongest directions stay and the energy of
the others goes to β.

Shapes: C ``(G, m, n)``, T ``(G, m, m)`` and β ``(G,)``, both in float64 where the device has it. Tensors without n in
their shape are computed for layers of all sizes at once.
Only `compress` makes the host wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsprune.optim.functional import Matrices


def wide(device: torch.device) -> torch.dtype:
    """Returns the dtype of the small matrices: float64, or float32 on Metal, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def gram(C: Tensor) -> Tensor:
    """Computes ``CCᵀ``, ``(G, m, m)``."""
    rows = C.to(wide(C.device))
    return rows.bmm(rows.mT)


def whitener(gram: Tensor) -> Tensor:
    """Computes ``T = L⁻¹`` for ``LLᵀ = I + CCᵀ``; NaN where C has grown too large for it."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(identity + gram)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return torch.where((info == 0)[:, None, None], inverse, torch.nan)


def excitation(T: Tensor, products: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Computes how a new row c of C relates to the present ones.

    Args:
        T: ``(G, m, m)``.
        products: ``Cc``, ``(G, m, 1)``.
        energy: ``cᵀc``, ``(G, 1, 1)``.

    Returns:
        ``TCc``, ``(G, m, 1)``, and ``cᵀ(I − ZᵀZ)c``, ``(G,)``: with ``c = √(k/β)·x`` it is ``k·xᵀPx``.
    """
    known = T.bmm(products)
    return known, torch.baddbmm(energy, known.mT, known, alpha=-1).view(-1)


def append_(T: Tensor, known: Tensor, excitation: Tensor) -> None:
    """Fills in the last row of T, in place, for a new row of C; it must be that of the identity before.

    With the results of `excitation`, ``L`` gets the row ``[knownᵀ, √(1 + excitation)]``, so that T, which is
    ``(G, m + 1, m + 1)``, gets ``[−knownᵀT, 1]/√(1 + excitation)``.
    """
    row, m = T[:, -1:], T.shape[-1] - 1
    row[..., :m].baddbmm_(known.mT, T[:, :m, :m], alpha=-1)  # zero before
    row.div_((1 + excitation).sqrt_().view(-1, 1, 1))


def thin_product(Z: Tensor, gradient: Matrices) -> Tensor:
    """Computes ``Z∇ᵀ``, ``(G, m, out)``."""
    weight, bias = gradient
    if bias is None:
        return Z.bmm(weight.mT)
    return Z[..., :-1].bmm(weight.mT).addcmul_(Z[..., -1:], bias.unsqueeze(-2))


def velocity_step_(
    velocity: Matrices, gradient: Matrices, Z: Tensor, thin: Tensor, momentum: float, scale: Tensor
) -> None:
    """Computes Eq. (21) in place, ``Ψ ← α·Ψ − s·(∇ − (Z∇ᵀ)ᵀZ)``, with `thin_product`, ``s = η/(hβ)``, ``(G, 1, 1)``."""
    (weight, bias), (weight_gradient, bias_gradient) = velocity, gradient
    left = (thin * scale).mT
    if bias is not None and bias_gradient is not None:
        column = bias.unsqueeze(-1).baddbmm_(left, Z[..., -1:], beta=momentum)
        column.addcmul_(bias_gradient.unsqueeze(-1), scale, value=-1)
        Z = Z[..., :-1]
    weight.baddbmm_(left, Z, beta=momentum).addcmul_(weight_gradient, scale, value=-1)


def forget(beta: Tensor, forgetting: float, limit: float) -> tuple[Tensor, Tensor]:
    """Computes ``β ← λβ``, but not below ``1/limit``, and the factor of CᵀC that makes up for the difference.

    A direction that is never excited keeps ``P = 1/β``, which plain forgetting lets grow without end (wind-up). At the
    floor C shrinks instead: ``λβ·CᵀC = β_floor·(λβ/β_floor)·CᵀC``.
    """
    wanted = beta * forgetting
    kept = wanted.clamp_min(1 / limit)
    return kept, wanted / kept


def compress(gram: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Computes the matrix that turns C into its ``rank`` strongest directions, ``(G, rank, m)``, and the factor of β.

    The energy τ that each of the other n − rank directions has lost on average goes to β, so that P⁻¹ keeps its trace:
    ``I + CᵀC + τ(I − QᵀQ) = (1 + τ)(I + (CᵀC − τQᵀQ)/(1 + τ))``, with the kept directions in Q. Otherwise a direction
    that is dropped every time would never accumulate, and P would stay too large there.

    Makes the host wait for the device once. ``inputs`` is n of each group, ``(G, 1)``.
    """
    energies, directions = torch.linalg.eigh(gram)
    energies, directions = energies.clamp_min(0).flip(-1), directions.flip(-1)[..., :rank]
    # The sign of an eigenvector is arbitrary: it is fixed, so that ranks with other libraries get the same C.
    largest = directions.gather(-2, directions.abs().argmax(-2, keepdim=True))
    kept = energies[..., :rank]
    lost = energies[..., rank:].sum(-1, keepdim=True) / (inputs - rank).clamp_min(1)
    left = (kept - lost).clamp_min(0) / (1 + lost)
    shares = (left / kept.clamp_min(torch.finfo(kept.dtype).tiny)).sqrt()
    return (directions * largest.sign()).mT * shares.unsqueeze(-1), (1 + lost).squeeze(-1)
