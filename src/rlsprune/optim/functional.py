"""The mathematics of RLS training, equations (16) to (22), as functions on plain tensors.

Shapes: a layer with ``G`` groups (1 but for grouped convolutions) and ``n`` inputs per group has a mean input ``x`` of
shape ``(G, n)`` and an inverse autocorrelation ``P`` of shape ``(G, n, n)``. Layers of equal size can be taken for one
layer with the groups of all of them. PyTorch stores a weight as (out, in), the
paper as (in, out); ``P`` is symmetric, so the paper's ``P·∇W`` is ``grad @ P`` here. A bias is the weight of an input
that is always 1 and comes last in ``x`` and ``P``.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

# Rows of P scaled at a time when forgetting: bounds the temporary at this many rows instead of the size of P.
_FORGET_ROWS = 256


def initial_inverse(x: Tensor, p0: float) -> Tensor:
    """``P = p0·I`` for a layer with this mean input."""
    groups, n = x.shape
    return torch.eye(n, dtype=x.dtype, device=x.device).mul_(p0).repeat(groups, 1, 1)


def gain(P: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``u = P x`` (Eq. 17) and the excitation ``xᵀ u`` of Eq. (18): ``h = λ + k·xᵀu``."""
    u = (x.unsqueeze(-2) @ P).squeeze(-2)  # P is symmetric, and P @ x takes ten times as long on a CPU
    return u, (x * u).sum(-1)


def rank_one_downdate_(P: Tensor, u: Tensor, h: Tensor, *, mean_scale: float, forgetting: float, limit: float) -> None:
    """Eq. (16) in place: ``P ← (P − k/h · u uᵀ) / λ``, exactly symmetric and without a temporary the size of P.

    With the factor folded into the vector, ``addcmul_`` computes ``P_ij − v_i·v_j``, the same in both triangles.
    ``addr_`` rounds its vectorised and its remaining columns differently, and any factor beside v does so too.

    Args:
        P: Inverse autocorrelation, changed in place.
        u: ``P x`` with the P before the update.
        h: ``λ + k·xᵀu``, one per group.
        mean_scale: The paper's k.
        forgetting: The paper's λ.
        limit: With λ < 1 no diagonal entry of P grows past this: see :func:`forget_`.
    """
    v = u * (mean_scale / h).sqrt().unsqueeze(-1)
    P.addcmul_(v.unsqueeze(-1), v.unsqueeze(-2), value=-1)
    if forgetting != 1:
        forget_(P, forgetting, limit)


def forget_(P: Tensor, forgetting: float, limit: float) -> None:
    """``P ← P / λ`` in place, except that no diagonal entry is scaled past ``limit``.

    An input that is always zero (a border pixel, a dead ReLU) is never excited, so plain forgetting multiplies its row
    by 1/λ for ever until it overflows (wind-up). Here ``P ← D P D`` with ``d_i = min(λ^-½, √(limit / P_ii))``: a
    congruence, so P stays symmetric positive definite, and exactly ``P / λ`` as long as no entry reaches the limit.
    """
    diagonal = P.diagonal(dim1=-2, dim2=-1)
    room = (limit / diagonal.clamp_min(torch.finfo(P.dtype).tiny)).sqrt()
    d = room.clamp(min=1.0, max=forgetting**-0.5)
    for rows in range(0, P.shape[-1], _FORGET_ROWS):
        part = slice(rows, rows + _FORGET_ROWS)
        P[..., part, :].mul_(d[..., part, None] * d[..., None, :])


def velocity_step_(
    weight_velocity: Tensor,
    bias_velocity: Tensor | None,
    left: Tensor,
    right: tuple[Tensor, Tensor | None],
    *,
    momentum: float,
    scale: Tensor,
) -> None:
    """Eq. (21) in place: ``Ψ ← α·Ψ − (η/h)·P∇``, with the preconditioned gradient given as ``left @ right``.

    The two ways of computing ``P∇W`` (equal in result, :func:`direct_factors` and :func:`batch_factors`) differ in how
    they split the product; neither makes a temporary of the preconditioned gradient.

    Args:
        weight_velocity: Ψ of the weight as a matrix per group, ``(G, out, n)``.
        bias_velocity: Ψ of the bias, ``(G, out)``, or None.
        left: ``(G, out, m)``.
        right: ``(G, m, n)``, and ``(G, m)`` for the bias.
        momentum: α.
        scale: ``η/h`` per group.
    """
    left = left * -scale[:, None, None]
    columns, bias_column = right
    weight_velocity.baddbmm_(left, columns, beta=momentum)
    if bias_velocity is not None and bias_column is not None:
        bias_velocity.mul_(momentum).add_((left @ bias_column.unsqueeze(-1)).squeeze(-1))


def direct_factors(gradient: Tensor, P: Tensor, bias: bool) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """``P∇`` as ``[∇W ∇b] @ P``: costs out·n² and needs the gradient alone.

    Args:
        gradient: ``[∇W ∇b]``, or ``∇W`` without a bias, ``(G, out, n)``.
        P: ``(G, n, n)``.
        bias: Whether the last of the n inputs is the bias's.
    """
    return gradient, ((P[..., :-1], P[..., -1]) if bias else (P, None))


def batch_factors(inputs: Tensor, deltas: Tensor, P: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """``P∇`` of a Linear layer as ``Δᵀ @ (X P)``, for ``∇W = Δᵀ X``: costs m·n·(n + out) for m rows.

    Args:
        inputs: X, ``(m, n)``, without the bias column.
        deltas: Δ, the loss's gradient at the layer's output, ``(m, out)``.
        P: ``(1, n, n)``, or one larger if the layer has a bias.
    """
    left, matrix, n = deltas.t().unsqueeze(0), P[0], inputs.shape[-1]
    if matrix.shape[-1] == n:
        return left, ((inputs @ matrix).unsqueeze(0), None)
    # The always-1 column of X adds the bias row of P to every row of the product. The bias's own column is computed
    # apart: a product n columns wide is faster than one of n + 1.
    product = torch.addmm(matrix[n, :n], inputs, matrix[:n, :n])
    bias_column = torch.addmv(matrix[n, n], inputs, matrix[:n, n])
    return left, (product.unsqueeze(0), bias_column.unsqueeze(0))


def mean_product(product: tuple[Tensor, Tensor | None]) -> Tensor:
    """``u = P x`` from the rows of ``X P`` (:func:`batch_factors`), whose mean it is."""
    columns, bias_column = product
    u = columns.mean(1)
    return u if bias_column is None else torch.cat([u, bias_column.mean(1, keepdim=True)], dim=1)


def mean_rows(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Eq. (19): the mean input of a fully-connected layer over the batch and any other leading dimensions."""
    return inputs.reshape(-1, inputs.shape[-1]).mean(0, dtype=dtype)


def mean_patch(images: Tensor, windows: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Eq. (20): the mean over batch and output positions of the unfolded patches, ``(C, *kernel)``.

    Unfolding is linear and separable, so the batch is averaged first and the one mean image is then contracted with
    the windows of each spatial dimension (:func:`window_weights`): exact, and no patch is ever written out.
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
    padding: tuple[int, int],
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, int]:
    """How often each position of a spatial dimension stands under each kernel tap, averaged over output positions.

    Returns:
        A ``(kernel, size)`` matrix with ``1/U`` for every output position at which the tap lies on that element (zero
        padding counts as zero, other modes as the element they repeat), and U, the number of output positions.
    """
    before, after = padding
    source = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")[None, None]
    # Element numbers start at 1, so that 0 is what zero padding leaves.
    padded = nn.functional.pad(source, (before, after), mode="constant" if mode == "zeros" else mode)[0, 0].long()
    positions = (padded.numel() - dilation * (kernel - 1) - 1) // stride + 1
    offsets = torch.arange(kernel, device="cpu")[:, None]
    taps = dilation * offsets + stride * torch.arange(positions, device="cpu")
    counts = torch.zeros(kernel, size + 1, dtype=torch.float64, device="cpu")
    counts.scatter_add_(1, padded[taps], torch.ones(taps.shape, dtype=torch.float64, device="cpu"))
    return (counts[:, 1:] / positions).to(device=device, dtype=dtype), positions
