"""Functions of torch that carry every channel on its own, and those that mix along some dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.graph.fields import Labelled, collapsed, merged, placed, stretched, varying, vector
from rlsprune.graph.function_call import FunctionCall, UnknownFunctionError

__all__ = ["carried", "halved", "layer_normalised", "normalised", "pointwise", "spatial", "within"]


def pointwise(operation: FunctionCall) -> Labelled:
    """Carries the channels of tensors of broadcastable shapes, entry by entry."""
    tensors = [value for value in operation.arguments.values() if isinstance(value, Tensor)]
    if operation.name == "copy" and not operation.labels_of(tensors[0]).fields:
        raise UnknownFunctionError
    known = [operation.labels_of(tensor) for tensor in tensors]
    return carried(operation, list(zip(tensors, known, strict=True)))


def carried(operation: FunctionCall, operands: Sequence[tuple[Tensor, Labelled]]) -> Labelled:
    """Carries the channels of operands of broadcastable shapes, entry by entry."""
    by_operand = [[stretched(labels, operation.shape) for labels in known.fields] for _, known in operands]
    weight = all(known.weight for _, known in operands if known.fields)
    active = {dim for (_, known), fields in zip(operands, by_operand, strict=True) if not known.weight
              for labels in fields for dim in varying(labels)}  # fmt: skip
    if not weight and active:
        # Of a lone table only the dimension that meets channels counts.
        by_operand = [
            fields if not known.weight else [labels for labels in fields if set(varying(labels)) & active]
            for (_, known), fields in zip(operands, by_operand, strict=True)
        ]
    fields = merged(operation.slots, [labels for each in by_operand for labels in each])
    for (tensor, _), mine in zip(operands, by_operand, strict=True):
        described = {dim for labels in mine for dim in varying(labels)}
        for labels in fields:
            fixed = [dim for dim in varying(labels) if dim not in described]
            if fixed and not _uniform(tensor, [dim - len(operation.shape) for dim in fixed]):
                operation.keep([labels], f"combines it ({operation.name}) with a tensor of fixed width")
    return Labelled(fields, weight)


def _uniform(tensor: Tensor, dims: Sequence[int]) -> bool:
    """Whether a tensor has equal entries along dimensions counted from the end."""
    first = tensor
    for dim in dims:
        if -dim <= tensor.ndim and tensor.shape[dim] > 1:
            first = first.narrow(dim, 0, 1)
    return first is tensor or bool((tensor == first).all())


def normalised(operation: FunctionCall) -> Labelled:
    """Carries channels through batch and group norm: scale, shift and statistics lie along the second dimension."""
    x = operation["input"]
    operands = [(x, operation.labels_of(x))]
    known = operation.norm if operation.norm is not None and len(operation.norm) == x.shape[1] else None
    if known is not None:
        operands.append((x[:1], Labelled([placed(known, 1, x.shape)], True)))
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (value := operation[name]) is None:
            continue
        vectors = [vector(operation.slots, each, 0) for each in operation.labels_of(value).fields]
        if known is None or len(vectors) != 1 or not torch.equal(vectors[0], known):
            fields = [placed(own, 1, x.shape) for own in vectors]
            operands.append((value.view(-1, *[1] * (x.ndim - 2)), Labelled(fields, True)))
    if operation.name == "native_group_norm":
        spatial = [
            each for each in operands[0][1].fields if 1 not in varying(each) and max(varying(each), default=0) > 1
        ]
        operation.keep(spatial, "normalises over it")
    return carried(operation, operands)


def halved(operation: FunctionCall) -> Labelled:
    """Ties the halves of a gated linear unit: one gates the other."""
    dim = operation["dim"]
    fields = []
    for labels in operation.labels_of(operation["self"]).fields:
        one, two = labels.chunk(2, dim)
        fields += merged(operation.slots, [one, two])
    return Labelled(fields)


# --- mixing -----------------------------------------------------------------------------------------------------------


def within(operation: FunctionCall) -> Labelled:
    """Follows sums, means, softmax and the like: entries along some dimensions become one, or depend on each other."""
    tensor = operation["self"] if "self" in operation.arguments else operation["input"]
    given = operation["dim"]
    dims = range(tensor.ndim) if given is None or given == [] else [given] if isinstance(given, int) else given
    return _mixed(operation, tensor, [dim % tensor.ndim for dim in dims] if tensor.ndim else [])


def spatial(operation: FunctionCall) -> Labelled:
    """Follows pooling, interpolation and padding with copies, which work within the last dimensions."""
    tensor = operation["self"] if "self" in operation.arguments else operation["input"]
    count = next((int(digit) for digit in "123" if f"{digit}d" in operation.name), 2)
    return _mixed(operation, tensor, range(tensor.ndim - count, tensor.ndim))


def layer_normalised(operation: FunctionCall) -> Labelled:
    """Follows layer norm and RMS norm, over the last dimensions."""
    tensor = operation["input"]
    count = len(operation["normalized_shape"])
    made = _mixed(operation, tensor, range(tensor.ndim - count, tensor.ndim), "normalises over the whole width")
    vectors = [value for name in ("weight", "bias") if (value := operation[name]) is not None]
    return carried(operation, [(tensor, made), *((value, operation.labels_of(value)) for value in vectors)])


def _mixed(operation: FunctionCall, tensor: Tensor, dims: Sequence[int], how: str | None = None) -> Labelled:
    known = operation.labels_of(tensor)
    fields = []
    for labels in known.fields:
        own = varying(labels)
        if own and set(own) <= set(dims):
            operation.keep([labels], how or f"mixes all of its channels ({operation.name.strip('_')})")
            if operation.shape == tensor.shape:
                fields.append(labels)
            continue
        flat = collapsed(operation.slots, labels, dims)
        for dim in sorted(dims, reverse=True):
            # The dimension goes if the function drops it.
            flat = flat.select(dim, 0) if len(operation.shape) < tensor.ndim else flat.narrow(dim, 0, 1)
        fields.append(flat.expand(operation.shape))
    return Labelled(fields, known.weight)
