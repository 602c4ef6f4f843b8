"""Heads of attention turned into their principal axes: the same function, with the dimensions in order of importance.

Scores depend on queries and keys only through their product, and outputs likewise on values and the output projection.
So the basis of each head can be chosen freely. In that of the singular vectors the first dimensions matter most, and
cutting off the last ones loses as little as any projection to so many dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlsprune.graph import Group, Member
from rlsprune.graph.layers import axis_of
from rlsprune.model.calls import ExampleInputs, as_call, output_tensors
from rlsprune.model.product import product_of
from rlsprune.model.tensors import exact, replace_data
from rlsprune.reconstruction.calibration import Calibration, Reduction

__all__ = ["Moments", "head_moments", "product_moments", "turn_heads"]

_RIDGE = 1e-4  # share of the mean of a diagonal
_SAME = 1e-3  # relative change of the outputs that rounding may cause in a turn


@dataclass
class Moments:
    """Second moments of some channels of one layer, head by head."""

    count: int = 0
    square: Tensor | None = None
    """``Σ x xᵀ``, (heads, width, width)."""
    total: Tensor | None = None
    """``Σ x``, (heads, width)."""

    def add(self, rows: Tensor) -> None:
        """Adds rows ``(m, heads, width)``."""
        by_head = exact(rows).movedim(1, 0)
        square, total = by_head.mT @ by_head, by_head.sum(1)
        self.square = square if self.square is None else self.square + square
        self.total = total if self.total is None else self.total + total
        self.count += len(rows)

    def second(self, *, centred: bool) -> Tensor | None:
        """Returns second moments, or covariances, with a little added to the diagonal; None if there are no rows."""
        if self.square is None or self.total is None or not self.count:
            return None
        result = self.square / self.count
        if centred:
            mean = self.total / self.count
            result = result - mean[:, :, None] * mean[:, None, :]
        ridge = _RIDGE * result.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)
        return result + ridge[:, None, None] * torch.eye(result.shape[1]).to(result)


@dataclass
class _Wanted:
    index: Tensor
    made: bool
    """Whether the channels are the layer's outputs, not its inputs."""
    moments: Moments = field(default_factory=Moments)


class _MomentsWatch(TorchFunctionMode):
    """A watch that sums the moments of the outputs and inputs of layers."""

    def __init__(self, wanted: Mapping[int, list[_Wanted]], padding: Tensor | None) -> None:
        super().__init__()
        self._wanted, self._padding = wanted, padding

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        product = product_of(func, args, kwargs or {})
        if product is not None and not product.dims:
            for wanted in self._wanted.get(id(product.weight), ()):
                values = result if wanted.made else product.inputs
                values = values.reshape(-1, values.shape[-1])
                counted = product.counted(self._padding)
                values = values if counted is None else values[counted]
                wanted.moments.add(values[:, wanted.index.to(values.device)])
        return result


def head_moments(model: nn.Module, members: Sequence[Member], batches: Calibration) -> list[Moments]:
    """Returns the moments of each member's channels, ``(heads × width)``, over inputs of the network."""
    wanted: dict[int, list[_Wanted]] = {}
    found = []
    for member in members:
        weight, start = _weight_of(member)
        found.append(_Wanted(member.index - start, member.side == "out"))
        if weight is not None:
            wanted.setdefault(id(weight), []).append(found[-1])
    for call in batches.calls if wanted else ():
        mask = call.get("attention_mask") if isinstance(call, Mapping) else None
        args, kwargs = as_call(call)
        with torch.no_grad(), _MomentsWatch(wanted, mask if isinstance(mask, Tensor) else None):
            model(*args, **kwargs)
    return _summed([one.moments for one in found], batches.reduction)


def _summed(moments: Sequence[Moments], reduction: Reduction) -> list[Moments]:
    """Returns the moments summed over all ranks, in one message."""
    known = [own for own in moments if own.square is not None and own.total is not None]
    parts = [part for own in known for part in (own.square, own.total, torch.tensor(float(own.count)))]
    sums = reduction.sums(*(part for part in parts if part is not None)) if known else []
    for number, own in enumerate(known):
        own.square, own.total, count = sums[3 * number : 3 * number + 3]
        own.count = int(count)
    return list(moments)


def product_moments(
    model: nn.Module, groups: Sequence[Group], batches: Calibration
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each group of dimensions the second moments of its queries and covariances of its keys, by head.

    A score that is the same for all keys changes nothing, so the mean of the keys does not count.
    """
    members = [member for group in groups for pair in group.products for member in pair]
    by_head = [_replaced(member, member.index.T) for member in members]
    moments = head_moments(model, by_head, batches)
    found = {}
    for number, group in enumerate(own for own in groups for _ in own.products):
        queries, keys = moments[2 * number].second(centred=False), moments[2 * number + 1].second(centred=True)
        if queries is not None and keys is not None:
            found[group.name] = (queries, keys)
    return found


@torch.no_grad()
def turn_heads(model: nn.Module, groups: Sequence[Group], batches: Calibration) -> list[str]:
    """Turns every head whose dimensions can go, unless that would change the network's outputs.

    Args:
        model: The network, in evaluation mode.
        groups: The groups of the network.
        batches: Inputs to find the axes on.

    Returns:
        Names of the groups whose dimensions are now principal axes.
    """
    inside = [group for group in groups if group.level == 2 and group.attention is not None]
    if not inside:
        return []
    reduction, first = batches.reduction, batches.calls[0]
    before = _outputs(model, first)
    known = product_moments(model, [group for group in inside if group.products], batches)
    readers = [member for group in inside for member in group.consumers[:1]]
    read = dict(
        zip(
            [id(member) for member in readers],
            head_moments(model, [_replaced(m, m.index.T) for m in readers], batches),
            strict=True,
        )
    )
    turned = []
    for group in inside:
        saved = {}
        for member in group.members:
            saved.update({id(tensor): (tensor, tensor.data) for tensor in _tensors(member)})
        done = False
        if group.name in known:
            _turn_products(group, *known[group.name])
            done = True
        if len(group.consumers) == 1 and (own := read[id(group.consumers[0])].second(centred=True)) is not None:
            done = _turn_values(group, own) or done
        if done:
            reduction.align([tensor.data for tensor, _ in saved.values()])  # the signs of axes are arbitrary
        if done and not all(reduction.gather(_alike(before, _outputs(model, first)))):
            for tensor, data in saved.values():
                replace_data(tensor, data)
            done = False
        if done:
            turned.append(group.name)
    return turned


def _turn_products(group: Group, queries: Tensor, keys: Tensor) -> None:
    """Turns queries to ``q A``, keys to ``k B`` with ``A Bᵀ = I``. Both second moments become the singular values."""
    ((query, key),) = group.products
    heads, places = _distinct(key.index.T)
    total = torch.zeros(len(heads), *queries.shape[1:]).to(queries).index_add_(0, places.to(queries.device), queries)
    first = torch.tensor([int((places == head).nonzero()[0]) for head in range(len(heads))])
    left, right = torch.linalg.cholesky(total), torch.linalg.cholesky(keys[first])
    U, S, Vt = torch.linalg.svd(left.mT @ right)
    root = S.clamp_min(S[:, :1] * 1e-12).sqrt()
    A = torch.linalg.solve_triangular(left.mT, U * root[:, None, :], upper=True)
    B = torch.linalg.solve_triangular(right.mT, Vt.mT * root[:, None, :], upper=True)
    _map_rows(query, query.index.T, A[places])
    _map_rows(key, heads, B)


def _turn_values(group: Group, covariance: Tensor) -> bool:
    """Turns values into ``v R``, and the columns that read them by ``R⁻ᵀ``, ordered by their part in the output."""
    reader = group.consumers[0]
    values = [member for member in group.producers if member.index.shape[1] and _is_value(member, group)]
    slabs = axis_of(reader.module, "in").slabs
    if len(values) != 1 or len(slabs) != 1:
        return False
    assert group.attention is not None
    columns = reader.index.T  # (query heads, dims)
    channels = group.attention.values.index  # (heads, dims)
    each = len(columns) // len(channels)
    weight = reader.module._parameters[slabs[0].tensor]
    assert weight is not None
    by_head = exact(weight.detach()).movedim(slabs[0].dim, 1)[:, columns].movedim(1, 0)  # (query heads, outputs, dims)
    # Columns of one unit are in order, so those of the queries that share a value are adjacent.
    places = torch.arange(len(columns)) // each
    shape = (len(channels), *covariance.shape[1:])
    total = torch.zeros(shape).to(covariance).index_add_(0, places.to(covariance.device), covariance)
    read = (
        torch.zeros(shape)
        .to(covariance)
        .index_add_(0, places.to(covariance.device), (by_head.mT @ by_head).to(covariance))
    )
    left = torch.linalg.cholesky(total)
    S, U = torch.linalg.eigh(left.mT @ read @ left)
    S, U = S.flip(1).clamp_min(S[:, -1:] * 1e-12).sqrt(), U.flip(2)
    root = S.sqrt()
    R = torch.linalg.solve_triangular(left.mT, U * root[:, None, :], upper=True)
    inverse = (left @ U) / root[:, None, :]  # R⁻ᵀ
    _map_rows(group.attention.values, channels, R)
    fresh = exact(weight.detach()).movedim(slabs[0].dim, 1).clone()
    fresh[:, columns.flatten()] = (by_head @ inverse[places].to(by_head)).movedim(0, 1).flatten(1)
    replace_data(weight, fresh.movedim(1, slabs[0].dim).contiguous().to(weight))
    return True


def _is_value(member: Member, group: Group) -> bool:
    return group.attention is not None and member.axis == group.attention.values.axis


def _map_rows(member: Member, channels: Tensor, matrices: Tensor) -> None:
    """Replaces the channels x of each head by ``x M``, in the weights and biases that make them."""
    for slab in axis_of(member.module, member.side).slabs:
        tensor = member.module._parameters.get(slab.tensor)
        if tensor is None:
            continue
        own = channels - slab.offset
        if int(own.min()) < 0 or int(own.max()) >= tensor.shape[slab.dim]:
            continue
        moved = exact(tensor.detach()).movedim(slab.dim, 0)
        fresh = moved.clone()
        rows = moved[own.to(tensor.device)].flatten(2) if moved.dim() > 1 else moved[own.to(tensor.device)].unsqueeze(2)
        turned = matrices.mT.to(rows) @ rows
        fresh[own.flatten().to(tensor.device)] = turned.reshape(-1, *moved.shape[1:])
        replace_data(tensor, fresh.movedim(0, slab.dim).contiguous().to(tensor))


def _tensors(member: Member) -> list[nn.Parameter]:
    """Returns all parameters that contain a member's channels."""
    slabs = axis_of(member.module, member.side).slabs if member.dim is None else ()
    found = [member.module._parameters.get(slab.tensor) for slab in slabs]
    return [tensor for tensor in found if tensor is not None]


def _weight_of(member: Member) -> tuple[nn.Parameter | None, int]:
    """Returns the weight that has all of a member's channels, and the number of its first channel."""
    for slab in axis_of(member.module, member.side).slabs:
        weight = member.module._parameters.get(slab.tensor)
        if weight is not None and slab.tensor.endswith("weight"):
            channels = member.index.flatten()
            if len(slab.entries(channels, weight.shape[slab.dim])) == len(channels):
                return weight, slab.offset
    return None, 0


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct rows, and for each row the index of its distinct one."""
    distinct, places = torch.unique(rows, dim=0, return_inverse=True)
    return distinct, places


def _replaced(member: Member, index: Tensor) -> Member:
    return Member(member.name, member.module, member.side, index, member.dim, member.reads)


def _outputs(model: nn.Module, call: ExampleInputs) -> list[Tensor]:
    args, kwargs = as_call(call)
    return output_tensors(model(*args, **kwargs))


def _alike(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    pairs = [(exact(one), exact(other)) for one, other in zip(before, after, strict=True) if one.is_floating_point()]
    return all(float((one - other).norm()) <= _SAME * max(float(one.norm()), math.ulp(0.0)) for one, other in pairs)
