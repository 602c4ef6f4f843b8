"""Scores of the units of a group; units with low scores go first.

A criterion returns one or more score tensors for a group. A vector scores its units. A matrix ``(units, k)`` scores the
k nodes of each unit (of a channel that is flattened into a fully-connected layer); a unit then goes if any of its nodes
is chosen. `rlsprune.prune.select` chooses the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph import Group, Member
from rlsprune.graph.layers import ModuleAxis, axis_of
from rlsprune.model.sizes import is_experts
from rlsprune.model.tensors import whole
from rlsprune.statistics.inverse import Inverse, cholesky_positive
from rlsprune.statistics.rows import has_rows, input_count, input_rows, weight_matrix

Criterion = Callable[[Group], Sequence[Tensor]]
InverseOf = Callable[[str], list[Inverse]]
"""A function that returns the P of each group of a layer, given the layer's name."""


def rls(group: Group, inverse_of: InverseOf) -> list[Tensor]:
    """Returns the paper's two scores, Eqs. (26) and (27): row sums of P (large goes) and L1 norms of W (small goes)."""
    from_inverse = _mean([_row_sums(member, inverse_of).sum(1) for member in _readers(group)])
    return [-score for score in from_inverse] + l1_of_producers(group)


def rls_paper(group: Group, inverse_of: InverseOf) -> list[Tensor]:
    """Scores like `rls`, but node by node behind a flatten, exactly as in section 3.2 of the paper."""
    readers = _readers(group)
    if len(readers) != 1 or not isinstance(readers[0].module, nn.Linear) or readers[0].index.shape[1] == 1:
        return rls(group, inverse_of)
    return [-_row_sums(readers[0], inverse_of), *l1_of_producers(group)]


def obs(group: Group, inverse_of: InverseOf) -> list[Tensor]:
    """Scores as optimal brain surgeon: the change of the layer's output after the best refit, ``tr(W_dᵀ P_dd⁻¹ W_d)``.

    The scores are averaged over all consumers, each scaled to a mean of 1. Weights alone score a consumer whose inputs
    are not rows of a matrix (a transposed convolution), and also queries and keys, which read each other.
    """
    return _mean([*(_surgeon(member, inverse_of) for member in group.consumers), *map(product_norms, group.products)])


def l1(group: Group) -> list[Tensor]:
    """Returns the L1 norm of the weights that make each unit, or for input features of the weights that read them."""
    return l1_of_producers(group) or _mean([weight_norms(member, 1) for member in group.consumers])


def l1_of_producers(group: Group) -> list[Tensor]:
    """Computes Eq. (27) with the scale of the batch norm behind each producer folded in; nothing for input features."""
    scores = []
    for member, norm in zip(group.producers, _following_norms(group), strict=True):
        score = weight_norms(member, 1)
        if norm is not None:
            score = score * _scales(norm)
        scores.append(score)
    return _mean(scores)


def criterion(kind: str | Criterion, inverse_of: InverseOf) -> Criterion:
    """Returns a criterion by its name, or the user's own function unchanged."""
    if callable(kind):
        return kind
    if kind == "l1":
        return l1
    if kind in BY_INVERSE:
        return partial(BY_INVERSE[kind], inverse_of=inverse_of)
    raise ValueError(f"criterion={kind!r} is not valid: it must be one of {', '.join(NAMES)}, or a callable")


BY_INVERSE = {"rls": rls, "rls-paper": rls_paper, "obs": obs}
NAMES = (*BY_INVERSE, "l1")


def _readers(group: Group) -> list[Member]:
    """Returns the consumers whose inputs are rows of a matrix, so that they have a P."""
    return [member for member in group.consumers if has_rows(member.module)]


def _row_sums(member: Member, inverse_of: InverseOf) -> Tensor:
    """Computes Eq. (26) for every channel of every unit, ``(units, k)``: row sums of P over the channel's rows."""
    rows = input_rows(member.module, member.index)
    sums = torch.stack([P.row_sums(input_count(member.module)) for P in inverse_of(member.name)])  # (groups, n)
    parts = [own[index.to(own.device)] for own, index in zip(sums, rows, strict=True)]
    taps = rows.shape[0] * rows.shape[2] // member.index.shape[1]
    return torch.cat(parts, dim=1).view(len(member.index), -1, taps).sum(2).cpu()


def _surgeon(member: Member, inverse_of: InverseOf) -> Tensor:
    layer = member.module
    if not has_rows(layer):
        return weight_norms(member, 2)
    scores = torch.zeros(len(member.index), dtype=torch.float64)
    for P, W, rows in zip(inverse_of(member.name), weight_matrix(layer), input_rows(layer, member.index), strict=True):
        blocks = P.blocks(rows.to(W.device))
        own = W[rows.to(W.device)]  # (units, rows of a unit, outputs)
        gram = (own @ own.mT).to(blocks)  # tr(WᵀP⁻¹W) = Σ P⁻¹ ∘ WWᵀ: there are fewer rows than outputs
        scores += (torch.cholesky_inverse(cholesky_positive(blocks)) * gram).sum((1, 2)).cpu()
    return scores


def weight_norms(member: Member, power: int) -> Tensor:
    """Returns the sum of ``|w|^power`` over the weights of each unit, in float64 on the CPU."""
    return _channel_norms(member, power).sum(1)


def _channel_norms(member: Member, power: int) -> Tensor:
    """Returns the sum of ``|w|^power`` over the weights of each channel of each unit."""
    axis = axis_of(member.module, member.side)
    if isinstance(member.module, nn.RNNBase) or is_experts(member.module):
        return _repeated_norms(member.module, axis, power)[member.index]
    parts = []
    for slab in axis.slabs:
        weight = getattr(member.module, slab.tensor, None)
        if weight is None or not slab.tensor.endswith("weight"):
            continue
        other_dims = [dim for dim in range(weight.dim()) if dim != slab.dim]
        dtype = torch.float32 if weight.device.type == "mps" else torch.float64
        parts.append(whole(weight.detach()).abs().pow(power).sum(other_dims, dtype=dtype).double().cpu())
    sums = torch.cat(parts)
    return sums[member.index % len(sums)]


def _repeated_norms(layer: nn.Module, axis: ModuleAxis, power: int) -> Tensor:
    """Returns the sums for each channel of a recurrent layer or of experts, over the weights that make or read it."""
    norms = torch.zeros(axis.size, dtype=torch.float64)
    for slab in axis.slabs:
        makes = slab.dim == 0 or "hidden_size" not in axis.attributes
        if makes and not slab.tensor.startswith("bias"):
            weight = whole(layer._parameters[slab.tensor].detach()).abs().pow(power)  # type: ignore[union-attr]
            others = [dim for dim in range(weight.dim()) if dim != slab.dim]
            sums = weight.sum(others).double().cpu().view(slab.repeats, -1).sum(0)
            norms[slab.offset : slab.offset + len(sums)] += sums
    return norms


def product_norms(product: tuple[Member, Member]) -> Tensor:
    """Returns the part of each dimension in the scores of attention, by the weights of queries and keys alone."""
    return (_channel_norms(product[0], 2) * _channel_norms(product[1], 2)).sum(1)


def _scales(member: Member) -> Tensor:
    """Returns ``|γ|`` of each unit. Not ``|γ|/σ``, as σ grows with the very weights whose norm it would divide."""
    norm = member.module
    assert isinstance(norm, _BatchNorm)
    scale = torch.ones(norm.num_features) if norm.weight is None else whole(norm.weight.detach()).abs().cpu()
    return scale.double()[member.index].mean(1)


def _following_norms(group: Group) -> list[Member | None]:
    """Finds for each producer the batch norm that is called with its output, or None."""
    norms = {member.reads: member for member in group.carriers if isinstance(member.module, _BatchNorm)}
    return [norms.get(producer.module) for producer in group.producers]


def _mean(scores: list[Tensor]) -> list[Tensor]:
    """Returns the mean of several score vectors, each divided by its mean absolute value; fewer than two unchanged."""
    if len(scores) < 2:
        return scores
    tiny = torch.finfo(torch.float64).tiny
    return [torch.stack([score / score.abs().mean().clamp_min(tiny) for score in scores]).mean(0)]
