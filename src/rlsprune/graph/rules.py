"""What each function of torch does to channels: it moves them, carries them, reads them, or mixes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rlsprune.graph.fields import (
    Labelled,
    aligned,
    collapsed,
    compact,
    merged,
    placed,
    stretched,
    tidy,
    varying,
    vector,
)
from rlsprune.graph.slots import Slots

__all__ = ["FunctionCall", "UnknownFunctionError", "apply_rule"]


class UnknownFunctionError(Exception):
    """No rule says what the function does to channels."""


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a function of torch."""

    name: str
    """Without overload, and without the underscore of functions that work in place."""
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    """By their names in the function's schema, defaults included."""
    results: list[Tensor]
    where: str
    """The module that makes the call."""
    slots: Slots
    labels_of: Callable[[Any], Labelled]
    is_lone: Callable[[Tensor], bool]
    """Whether a field numbers entries of a parameter that belongs to no layer of a known kind."""
    filters: Callable[[Any], tuple[Tensor, Tensor] | None]
    """The channels that a convolution with this weight reads and makes; None for a weight of no known layer."""
    norm: Tensor | None
    """The channels of the normalisation that makes the call, if it is one."""
    obstacle: str | None
    """Why the layer that makes the call cannot be cut, if it is one of a known kind."""

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> torch.Size:
        """The shape of the first result."""
        return self.results[0].shape

    def keep(self, fields: Iterable[Tensor], why: str) -> None:
        """The channels of these fields have to stay."""
        for labels in fields:
            self.slots.keep(compact(labels), f"{self.where} {why}")


def apply_rule(operation: FunctionCall) -> list[Labelled]:
    """The labels of the function's results.

    Raises:
        UnknownFunctionError: No rule is known.
    """
    name = operation.name
    if name in _MOVES:
        return _moved(operation)
    if rule := _RULES.get(name):
        return [rule(operation)]
    if name.startswith(_SPATIAL):
        return [_spatial(operation)]
    if torch.Tag.pointwise in operation.function.tags:
        return [_pointwise(operation)]
    if name.startswith("_scaled_dot_product"):
        return [_attention(operation)]
    tensors = [value for value in operation.arguments.values() if isinstance(value, Tensor)]
    if [tensor.shape for tensor in tensors] == [result.shape for result in operation.results]:
        # Of one tensor one like it: channel by channel, as the verification will show.
        return [operation.labels_of(tensors[0])]
    raise UnknownFunctionError


# --- functions that move entries --------------------------------------------------------------------------------------

_COPIES = {"clone", "contiguous", "_to_copy", "detach", "alias", "lift_fresh", "view_as", "to", "dropout"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"}
_SPLITS = {"split", "unsafe_split", "unsafe_chunk", "chunk", "split_with_sizes"}
_MOVES = {
    *_COPIES,
    *_VIEWS,
    *_SPLITS,
    *("permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "narrow", "unbind", "unfold"),
    *("flip", "roll", "repeat", "constant_pad_nd", "index_select", "index", "diagonal", "gather", "repeat_interleave"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
}


def _moved(operation: FunctionCall) -> list[Labelled]:
    source = operation["self"] if "self" in operation.arguments else operation["input"]
    known = operation.labels_of(source)
    by_result: list[list[Tensor]] = [[] for _ in operation.results]
    for labels in known.fields:
        pieces = _move(operation, labels)
        for fields, piece in zip(by_result, pieces, strict=True):
            fields.append(piece)
        if operation.name in _SPLITS and len({piece.shape for piece in pieces}) == 1 and len(pieces) > 1:
            _grid(operation.slots, torch.stack(aligned([compact(piece) for piece in pieces])))
        if operation.name.endswith("channel_shuffle"):
            channels = vector(operation.slots, labels, len(operation.shape) - 3)
            _grid(operation.slots, channels.view(operation["groups"], -1))
        for piece in pieces:
            if operation.name in _VIEWS and len(varying(piece)) > 1:
                _grid(operation.slots, compact(piece))
            if operation.name in ("select", "index") and varying(labels) and not varying(piece):
                operation.keep([piece], "picks it out by its number")
    return [Labelled(fields, known.weight) for fields in by_result]


def _move(operation: FunctionCall, labels: Tensor) -> list[Tensor]:
    if operation.name in _COPIES:
        return [labels]
    if operation.name in _VIEWS:
        return [tidy(labels.reshape(operation.shape))]
    if operation.name == "constant_pad_nd":
        # Along dimensions in which channels do not differ, what is added belongs to each of them.
        last, dims = labels.ndim - 1, varying(labels)
        added = [size if last - place // 2 in dims else 0 for place, size in enumerate(operation["pad"])]
        return [_resized(tidy(operation.function(labels, added, -1)), operation.shape)]
    args, kwargs = tree_map(_on_cpu, (operation.args[1:], operation.kwargs))
    moved = operation.function(labels, *args, **kwargs)
    return [tidy(piece) for piece in ([moved] if isinstance(moved, Tensor) else moved)]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _grid(slots: Slots, labels: Tensor) -> None:
    slots.grids.append(labels.squeeze())


def _joined(operation: FunctionCall) -> Labelled:
    """Tensors one after the other: the channels of each along that dimension, and what they share along others."""
    tensors = [tensor for tensor in operation["tensors"] if tensor.numel()]
    dim = operation["dim"] or 0
    known = [operation.labels_of(tensor) for tensor in tensors]
    if operation.name == "stack":
        dim %= tensors[0].ndim + 1
        known = [Labelled([labels.unsqueeze(dim) for labels in each.fields], each.weight) for each in known]
        tensors = [tensor.unsqueeze(dim) for tensor in tensors]
    dim %= tensors[0].ndim
    along, beside = [], []
    for tensor, each in zip(tensors, known, strict=True):
        mine = torch.full((), -1).expand(tensor.shape)
        for labels in each.fields:
            if dim in varying(labels):
                mine = labels
            else:
                beside.append(stretched(labels.narrow(dim, 0, 1), operation.shape))
        shape = [tensor.shape[dim] if place == dim else size for place, size in enumerate(compact(mine).shape)]
        along.append(compact(mine).expand(shape))
    shape = [max(sizes) for sizes in zip(*(piece.shape for piece in along), strict=True)]
    pieces = [piece.expand([*shape[:dim], piece.shape[dim], *shape[dim + 1 :]]) for piece in along]
    line = tidy(torch.cat(pieces, dim).expand(operation.shape))
    fields = merged(operation.slots, beside)
    if bool((compact(line) >= 0).any()):
        fields.append(line)
    return Labelled(fields, all(each.weight for each in known if each.fields))


# --- functions that carry every channel on its own --------------------------------------------------------------------


def _pointwise(operation: FunctionCall) -> Labelled:
    tensors = [value for value in operation.arguments.values() if isinstance(value, Tensor)]
    if operation.name == "copy" and not operation.labels_of(tensors[0]).fields:
        raise UnknownFunctionError
    known = [operation.labels_of(tensor) for tensor in tensors]
    return _carried(operation, list(zip(tensors, known, strict=True)))


def _carried(operation: FunctionCall, operands: Sequence[tuple[Tensor, Labelled]]) -> Labelled:
    """Operands of broadcastable shapes, entry by entry."""
    by_operand = [[stretched(labels, operation.shape) for labels in known.fields] for _, known in operands]
    weight = all(known.weight for _, known in operands if known.fields)
    active = {dim for (_, known), fields in zip(operands, by_operand, strict=True) if not known.weight
              for labels in fields for dim in varying(labels)}  # fmt: skip
    if not weight and active:
        # Of a table by itself only the dimension that meets channels counts.
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


def _normalised(operation: FunctionCall) -> Labelled:
    """Batch norm and group norm: a vector for each of scale, shift and statistics, along the second dimension."""
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
    return _carried(operation, operands)


def _halved(operation: FunctionCall) -> Labelled:
    """A gated linear unit: one half gates the other."""
    dim = operation["dim"]
    fields = []
    for labels in operation.labels_of(operation["self"]).fields:
        one, two = labels.chunk(2, dim)
        fields += merged(operation.slots, [one, two])
    return Labelled(fields)


# --- functions that mix along some dimensions -------------------------------------------------------------------------


def _within(operation: FunctionCall) -> Labelled:
    """Sums, means, softmax and the like: entries along some dimensions become one, or depend on each other."""
    tensor = operation["self"] if "self" in operation.arguments else operation["input"]
    given = operation["dim"]
    dims = range(tensor.ndim) if given is None or given == [] else [given] if isinstance(given, int) else given
    return _mixed(operation, tensor, [dim % tensor.ndim for dim in dims] if tensor.ndim else [])


def _spatial(operation: FunctionCall) -> Labelled:
    """Pooling, interpolation, padding with copies: within the last dimensions."""
    tensor = operation["self"] if "self" in operation.arguments else operation["input"]
    count = next((int(digit) for digit in "123" if f"{digit}d" in operation.name), 2)
    return _mixed(operation, tensor, range(tensor.ndim - count, tensor.ndim))


def _layer_normalised(operation: FunctionCall) -> Labelled:
    tensor = operation["input"]
    count = len(operation["normalized_shape"])
    made = _mixed(operation, tensor, range(tensor.ndim - count, tensor.ndim), "normalises over the whole width")
    vectors = [value for name in ("weight", "bias") if (value := operation[name]) is not None]
    return _carried(operation, [(tensor, made), *((value, operation.labels_of(value)) for value in vectors)])


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
            # Without the dimension if the function drops it.
            flat = flat.select(dim, 0) if len(operation.shape) < tensor.ndim else flat.narrow(dim, 0, 1)
        fields.append(flat.expand(operation.shape))
    return Labelled(fields, known.weight)


# --- functions that read channels -------------------------------------------------------------------------------------


def _product(operation: FunctionCall) -> Labelled:
    """A matrix product: what lies along the dimension that is summed over is read, the rest is carried."""
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
    return _carried(operation, [(operation.results[0], made), (shift, operation.labels_of(shift))])


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
        why = operation.obstacle and f"cannot be cut: {operation.obstacle}"
        operation.keep([*read, *by], why or "multiplies it with a matrix of fixed width")


def _convolved(operation: FunctionCall) -> Labelled:
    x, weight, bias = operation["input"], operation["weight"], operation["bias"]
    known, kernel = operation.labels_of(x), operation.labels_of(weight)
    slots, spatial = operation.slots, set(range(2, x.ndim))
    read = [labels for labels in known.fields if 1 in varying(labels)]
    beside = [labels for labels in known.fields if not _among(labels, read)]
    operation.keep([labels for labels in beside if set(varying(labels)) & spatial], "mixes all of its channels")
    fields = [_resized(labels, operation.shape) for labels in beside if not set(varying(labels)) & spatial]
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
    return _carried(operation, [
        (operation.results[0], Labelled(fields)), (bias.view(-1, *[1] * (x.ndim - 2)), Labelled(shifts, True)),
    ])  # fmt: skip


def _resized(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Stretched to another size where it does not vary."""
    return compact(labels).expand(shape)


def _looked_up(operation: FunctionCall) -> Labelled:
    fields = [labels for labels in operation.labels_of(operation["weight"]).fields if 1 in varying(labels)]
    last = len(operation.shape) - 1
    return Labelled([placed(vector(operation.slots, labels, 1), last, operation.shape) for labels in fields])


def _attention(operation: FunctionCall) -> Labelled:
    """Softmax(q kᵀ) v, fused: the result has the channels of v."""
    known = [operation.labels_of(operation[name]) for name in ("query", "key", "value")]
    operation.keep([labels for each in known for labels in each.fields], "is attention")
    value = operation["value"]
    if value.ndim != len(operation.shape):
        return Labelled()
    free = value.ndim - 2
    return Labelled([
        _resized(collapsed(operation.slots, labels, [free]), operation.shape)
        for labels in known[2].fields
        if all(size in (1, operation.shape[dim]) for dim, size in enumerate(compact(labels).shape))
    ])  # fmt: skip


def _nothing(_: FunctionCall) -> Labelled:
    return Labelled()


_RULES: dict[str, Callable[[FunctionCall], Labelled]] = {
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("_prelu_kernel", "copy", "native_dropout", "masked_fill", "where", "addcmul", "lerp"), _pointwise),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "native_group_norm"),
        ),
        _normalised,
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _layer_normalised),
    "glu": _halved,
    **dict.fromkeys(
        (
            *("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "norm", "prod", "any"),
            *("linalg_vector_norm", "logsumexp", "argmax", "argmin", "all", "median", "cumsum", "cumprod", "aminmax"),
            *("_softmax", "_log_softmax", "sort", "topk", "argsort", "logcumsumexp"),
        ),
        _within,
    ),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
    "convolution": _convolved,
    "embedding": _looked_up,
    **dict.fromkeys(
        (
            *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones"),
            *(
                "new_full",
                "new_empty",
                "new_empty_strided",
                "_local_scalar_dense",
                "is_nonzero",
                "equal",
                "is_same_size",
            ),
        ),
        _nothing,
    ),
}

_SPATIAL = (
    *(
        "max_pool",
        "avg_pool",
        "adaptive_",
        "_adaptive_",
        "upsample_",
        "_upsample_",
        "reflection_pad",
        "replication_pad",
    ),
    *("grid_sampler", "fractional_max_pool"),
)
