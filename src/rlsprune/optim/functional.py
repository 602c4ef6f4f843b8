"""The mathematics of RLS training, equations (16) to (22), as functions on plain tensors.

Shapes: a layer with ``G`` groups (1 except in grouped convolutions) and ``n`` inputs per group has a mean input ``x``
of shape ``(G, n)`` and an inverse autocorrelation ``P`` of shape ``(G, n, n)``. Layers of equal size can be taken for
one layer with the groups of all of them. PyTorch stores a weight as (out, in), the paper as (in, out); ``P`` is
symmetric, so the paper's ``P·∇W`` is ``grad @ P`` here. A bias is the weight of an input that is always 1 and comes
last in ``x`` and ``P``.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

Matrices = tuple[Tensor, Tensor | None]
"""Tensor for the weight, ``(G, out, n)``, and for the bias, ``(G, out)``, if there is one."""

# Rows of P scaled at a time when forgetting: bounds the temporary at this many rows instead of the size of P.
_FORGET_ROWS = 256


def initial_inverse(x: Tensor, p0: float) -> Tensor:
    """Returns ``P = p0·I`` for a layer with this mean input."""
    groups, n = x.shape
    return torch.eye(n, dtype=x.dtype, device=x.device).mul_(p0).repeat(groups, 1, 1)


def gain(P: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``u = P x`` (Eq. 17) and the excitation ``xᵀ u`` of Eq. (18): ``h = λ + k·xᵀu``."""
    u = (x.unsqueeze(-2) @ P).squeeze(-2)  # P is symmetric, and P @ x takes ten times as long on a CPU
    return u, (x * u).sum(-1)


def subtract_square_(P: Tensor, v: Tensor, sign: Tensor) -> None:
    """Computes ``P ← P − s·vvᵀ`` in place, s = ±1 per group ``(G, 1)``: exactly symmetric, no temporary of P's size.

    ``addcmul_`` computes ``P_ij − v_i·(s·v_j)``, the same in both triangles. ``addr_`` rounds its vectorised and its
    remaining columns differently, and a factor s other than ±1 rounds the triangles differently.
    """
    P.addcmul_(v.unsqueeze(-1), (v * sign).unsqueeze(-2), value=-1)


def forget_(P: Tensor, forgetting: float, limit: float, gate: Tensor | None) -> None:
    """Computes ``P ← P / λ`` in place if the gate is open, but scales no diagonal entry past ``limit``.

    An input that is always zero (a border pixel, a dead ReLU) is never excited, so plain forgetting multiplies its row
    by 1/λ for ever until it overflows (wind-up). Here ``P ← D P D`` with ``d_i = min(λ^-½, √(limit / P_ii))``: a
    congruence, so P stays symmetric positive definite, and exactly ``P / λ`` as long as no entry reaches the limit.
    """
    diagonal = P.diagonal(dim1=-2, dim2=-1)
    room = (limit / diagonal.clamp_min(torch.finfo(P.dtype).tiny)).sqrt()
    d = room.clamp(min=1.0, max=forgetting**-0.5)
    d = d if gate is None else torch.where(gate, d, 1)
    for rows in range(0, P.shape[-1], _FORGET_ROWS):
        part = slice(rows, rows + _FORGET_ROWS)
        P[..., part, :].mul_(d[..., part, None] * d[..., None, :])


def norm(gradient: Tensor, bias_gradient: Tensor | None) -> Tensor:
    """Returns each group's gradient norm; not finite if an entry is not (or is above 1e19, whose square is not)."""
    total: Tensor = torch.linalg.vector_norm(gradient, dim=(1, 2))
    return total if bias_gradient is None else total.hypot(torch.linalg.vector_norm(bias_gradient, dim=1))


def velocity_step_(velocity: Matrices, gradient: Matrices, P: Tensor, momentum: float, scale: Tensor) -> None:
    """Computes Eq. (21) in place, ``Ψ ← α·Ψ − s·P∇`` with ``s = η/h`` per group, without a temporary of P∇."""
    (weight, bias), (weight_gradient, bias_gradient) = velocity, gradient
    if bias is None or bias_gradient is None:
        weight.baddbmm_(weight_gradient * -scale[:, None, None], P, beta=momentum)
        return
    left = torch.cat([weight_gradient, bias_gradient.unsqueeze(-1)], dim=-1).mul_(-scale[:, None, None])
    weight.baddbmm_(left, P[..., :-1], beta=momentum)
    bias.mul_(momentum).add_((left @ P[..., -1:]).squeeze(-1))


def mean_rows(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes Eq. (19), the mean input of a fully-connected layer over the batch and other leading dimensions."""
    return inputs.reshape(-1, inputs.shape[-1]).mean(0, dtype=dtype)


def mean_patch(images: Tensor, windows: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Computes Eq. (20), the mean over batch and output positions of the unfolded patches, ``(C, *kernel)``.

    Unfolding is linear and separable, so the batch is averaged first and the one mean image is then contracted with
    the windows of each spatial dimension (`window_weights`): exact, and no patch is ever written out.
    """
    rows = images.movedim(1, -1)
    if rows.is_contiguous():  # channels_last: averaging it as it lies in memory is several times faster
        mean = rows.flatten(1).mean(0, dtype=dtype).view(rows.shape[1:]).movedim(-1, 0)
    else:
        mean = images.mean(0, dtype=dtype)
    for window in windows:
        mean = torch.tensordot(mean, window, dims=([1], [1]))
    return mean


@functools.lru_cache(maxsize=512)
def window_weights(
    size: int,
    kernel: int,
    stride: int,
    dilation: int,
    before: int,
    after: int,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Counts how often each position of a spatial dimension is under each kernel tap, averaged over output positions.

    Returns:
        A ``(kernel, size)`` matrix with ``1/U`` for every output position at which the tap lies on that element (zero
        padding counts as zero, other modes as the element they repeat), and U, the number of output positions.
    """
    source = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")[None, None]
    # Element numbers start at 1, so that 0 marks zero padding.
    padded = nn.functional.pad(source, (before, after), mode="constant" if mode == "zeros" else mode)[0, 0].long()
    positions = (padded.numel() - dilation * (kernel - 1) - 1) // stride + 1
    offsets = torch.arange(kernel, device="cpu")[:, None]
    taps = dilation * offsets + stride * torch.arange(positions, device="cpu")
    counts = torch.zeros(kernel, size + 1, dtype=torch.float64, device="cpu")
    counts.scatter_add_(1, padded[taps], torch.ones(taps.shape, dtype=torch.float64, device="cpu"))
    return (counts[:, 1:] / positions).to(device=device, dtype=dtype), positions
