"""Functions of torch that put entries elsewhere: their channels go along."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rlsprune.graph.fields import Labelled, aligned, compact, merged, resized, stretched, tidy, varying, vector
from rlsprune.graph.function_call import FunctionCall
from rlsprune.graph.slots import Slots

__all__ = ["MOVES", "joined", "moved"]

_COPIES = {"clone", "contiguous", "_to_copy", "detach", "alias", "lift_fresh", "view_as", "to", "dropout"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"}
_SPLITS = {"split", "unsafe_split", "unsafe_chunk", "chunk", "split_with_sizes"}
MOVES = {
    *_COPIES,
    *_VIEWS,
    *_SPLITS,
    *("permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "narrow", "unbind", "unfold"),
    *("flip", "roll", "repeat", "constant_pad_nd", "index_select", "index", "diagonal", "gather", "repeat_interleave"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
}


def moved(operation: FunctionCall) -> list[Labelled]:
    """Applies the function itself to the numbers of the channels."""
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
        return [resized(tidy(operation.function(labels, added, -1)), operation.shape)]
    args, kwargs = tree_map(_on_cpu, (operation.args[1:], operation.kwargs))
    moved = operation.function(labels, *args, **kwargs)
    return [tidy(piece) for piece in ([moved] if isinstance(moved, Tensor) else moved)]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _grid(slots: Slots, labels: Tensor) -> None:
    slots.grids.append(labels.squeeze())


def joined(operation: FunctionCall) -> Labelled:
    """Joins tensors one after the other: channels of each along that dimension, and those they share along others."""
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
