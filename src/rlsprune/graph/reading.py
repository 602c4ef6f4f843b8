"""Functions of torch that read channels: products, convolutions, attention."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rlsprune.graph.carrying import carried
from rlsprune.graph.fields import Labelled, collapsed, compact, merged, placed, resized, stretched, varying, vector
from rlsprune.graph.function_call import FunctionCall

__all__ = ["attention", "convolved", "looked_up", "product"]


def product(operation: FunctionCall) -> Labelled:
    """Follows a matrix product: channels along the dimension that is summed over are read, the rest are carried."""
    one, two, shift = _factors(operation)
    left, right = operation.labels_of(one), operation.labels_of(two)
    inner = max(two.ndim - 2, 0)
    read = [labels for labels in left.fields if one.ndim - 1 in varying(labels)]
    by = [labels for labels in right.fields if inner in varying(labels)]
    _read(operation, read, left.weight, one.ndim - 1, by, right.weight, inner)
    fields = [labels.select(-1, 0) for labels in left.fields if not _among(labels, read)]
    fields = [labels.unsqueeze(-1) if two.ndim > 1 else labels for labels in fields]
    for labels in right.fields:
        if not _among(labels, by):
            rest = labels.select(inner, 0)
            fields.append(rest.unsqueeze(-2) if two.ndim > 1 else rest)
    fields = merged(operation.slots, [stretched(labels, operation.shape) for labels in fields])
    made = Labelled(fields, left.weight and right.weight)
    if shift is None:
        return made
    return carried(operation, [(operation.results[0], made), (shift, operation.labels_of(shift))])


def _factors(operation: FunctionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    if operation.name in ("mm", "bmm"):
        return operation["self"], operation["mat2"], None
    if operation.name in ("mv", "dot"):
        return operation["self"], operation["vec"] if operation.name == "mv" else operation["tensor"], None
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}[operation.name]
    return operation[names[0]], operation[names[1]], operation["self"]


def _among(labels: Tensor, others: Iterable[Tensor]) -> bool:
    return any(labels is other for other in others)


def _read(
    operation: FunctionCall,
    read: list[Tensor],
    read_weight: bool,
    dim: int,
    by: list[Tensor],
    by_weight: bool,
    by_dim: int,
) -> None:
    slots = operation.slots
    if read and by and (read_weight or by_weight):
        for one in read:
            for two in by:
                slots.tie_all(vector(slots, one, dim), vector(slots, two, by_dim))
        for labels in [*(by if by_weight else ()), *(read if read_weight else ())]:
            if operation.is_lone(labels):
                operation.keep([labels], "multiplies it with a parameter that belongs to no layer of a known kind")
    elif read and by:
        operation.keep([*read, *by], "multiplies it with what other layers make, as attention does")
    elif not (by_weight and by) and not (read_weight and read):
        why = operation.obstacle()
        operation.keep([*read, *by], f"cannot be cut: {why}" if why else "multiplies it with a matrix of fixed width")


def convolved(operation: FunctionCall) -> Labelled:
    """Follows a convolution: its filters read channels along the second dimension, and make others."""
    x, weight, bias = operation["input"], operation["weight"], operation["bias"]
    known, kernel = operation.labels_of(x), operation.labels_of(weight)
    slots, spatial = operation.slots, set(range(2, x.ndim))
    read = [labels for labels in known.fields if 1 in varying(labels)]
    beside = [labels for labels in known.fields if not _among(labels, read)]
    operation.keep([labels for labels in beside if set(varying(labels)) & spatial], "mixes all of its channels")
    fields = [resized(labels, operation.shape) for labels in beside if not set(varying(labels)) & spatial]
    filters = operation.filters(weight)
    reads = int(not operation["transposed"])
    if filters is not None:
        for labels in read:
            slots.tie_all(vector(slots, labels, 1), filters[0])
        fields.append(placed(filters[1], 1, operation.shape))
    else:
        by = [labels for labels in kernel.fields if reads in varying(labels)]
        if operation["groups"] > 1:
            operation.keep([*read, *kernel.fields], "reads it with filters that are computed")
        else:
            _read(operation, read, False, 1, by, kernel.weight, reads)
            made = [labels for labels in kernel.fields if 1 - reads in varying(labels)]
            fields += [placed(vector(slots, labels, 1 - reads), 1, operation.shape) for labels in made]
    if bias is None:
        return Labelled(fields)
    shifts = [placed(labels, 1, operation.shape) for labels in operation.labels_of(bias).fields]
    return carried(operation, [
        (operation.results[0], Labelled(fields)), (bias.view(-1, *[1] * (x.ndim - 2)), Labelled(shifts, True)),
    ])  # fmt: skip


def looked_up(operation: FunctionCall) -> Labelled:
    """Follows the lookup of rows of an embedding."""
    fields = [labels for labels in operation.labels_of(operation["weight"]).fields if 1 in varying(labels)]
    last = len(operation.shape) - 1
    return Labelled([placed(vector(operation.slots, labels, 1), last, operation.shape) for labels in fields])


def attention(operation: FunctionCall) -> Labelled:
    """Follows softmax(q kᵀ) v, fused: the result has the channels of v."""
    known = [operation.labels_of(operation[name]) for name in ("query", "key", "value")]
    operation.keep([labels for each in known for labels in each.fields], "is attention")
    value = operation["value"]
    if value.ndim != len(operation.shape):
        return Labelled()
    free = value.ndim - 2
    return Labelled([
        resized(collapsed(operation.slots, labels, [free]), operation.shape)
        for labels in known[2].fields
        if all(size in (1, operation.shape[dim]) for dim, size in enumerate(compact(labels).shape))
    ])  # fmt: skip
