"""One run of the network in which every entry of every tensor knows the channels that it was made from.

A function that moves entries moves their labels; one that computes entry by entry joins them; a linear or convolution
layer reads the labels of its inputs and gives its outputs new ones. For a product of two such tensors, as of queries
and keys, the channels that were multiplied are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from rlsprune.graph.contractions import Contraction, Products, Slot, merged_contractions
from rlsprune.graph.function_names import CASTS, ELEMENTWISE, FILLING, MIXING, MOVING, REDUCING, bare_name, mixed_dims
from rlsprune.graph.labels import EVERYTHING, NOTHING, LabelSets
from rlsprune.graph.layers import axis_of, join, sides
from rlsprune.graph.members import Axis
from rlsprune.graph.observe import Call
from rlsprune.graph.sites import DROPOUTS
from rlsprune.model.collector import without_collector
from rlsprune.model.product import product_of
from rlsprune.model.sizes import HEAD_SIZES, head_sizes, is_transposed_linear
from rlsprune.model.tensors import tensors_in

__all__ = ["Flow", "follow_channels"]

_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_TURNS = {"t", "T", "mT", "transpose", "swapaxes", "swapdims"}
_BIASED_PRODUCTS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm}


@dataclass
class Flow:
    """The findings of a run."""

    labels: LabelSets
    slots: list[Slot]
    lone: dict[Axis, tuple[nn.Module, int]]
    """Parameters that stand by themselves: the module that owns each, and the dimension that its channels lie along."""
    reads: dict[Axis, list[int]]
    """The inputs of a layer → the label of each."""
    contractions: list[Contraction]
    biases: dict[int, list[int]]
    """Slot of a layer's output → slots of lone parameters that are its bias."""

    @cached_property
    def weighed(self) -> dict[Axis, set[frozenset[int]]]:
        """Returns inputs of a layer → the channels behind the scores of each: the same for all inputs of one head."""
        return {axis: {self.labels[number].scores for number in set(read)} for axis, read in self.reads.items()}


@without_collector()
def follow_channels(model: nn.Module, call: Call) -> Flow:
    """Runs the network once, in the mode it is in. If the run fails, nothing is known of its attention."""
    watch = _Watch(model)
    try:
        with torch.no_grad(), watch:
            model(*call.args, **call.kwargs)
    except Exception:
        watch.contractions.clear()
    contractions = merged_contractions(watch.contractions)
    return Flow(watch.labels, watch.slots, watch.lone, watch.reads, contractions, watch.biases)


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.labels, self.slots, self.lone = LabelSets(), list[Slot](), dict[Axis, tuple[nn.Module, int]]()
        self.reads: dict[Axis, list[int]] = {}
        self._products = Products(self.labels, self.slots, self.lone)
        self.contractions = self._products.contractions
        self.biases: dict[int, list[int]] = {}
        self._starts: dict[Axis, int] = {}
        self._owners = {
            id(parameter): (name, module, own)
            for name, module in model.named_modules()
            for own, parameter in (*module._parameters.items(), *_beside_parameters(module))
            if parameter is not None
        }
        self._turned = {own: found for own, found in self._owners.items() if is_transposed_linear(found[1])}
        """Weights as (inputs, outputs): those of layers that keep them so, and transposed ones of others."""
        # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    # --- labels of tensors --------------------------------------------------------------------------------------------

    def _of(self, tensor: Tensor) -> Tensor:
        """Returns the labels of a tensor; a parameter gets its own when it is first used."""
        if id(tensor) not in self._known:
            labels = self._of_parameter(tensor) if id(tensor) in self._owners else _zeros(tensor)
            self._known[id(tensor)] = (tensor, labels)
        return self._known[id(tensor)][1]

    def _followed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._owners or (id(tensor) in self._known and bool(self._of(tensor).any()))

    def _of_parameter(self, parameter: Tensor) -> Tensor:
        name, module, own = self._owners[id(parameter)]
        attends = isinstance(module, nn.MultiheadAttention)
        slabs = axis_of(module, "out").slabs if attends or "out" in sides(module) else ()
        slab = next((slab for slab in slabs if slab.tensor == own and slab.repeats == 1), None)
        if slab is not None and slab.groups == 1 and parameter.dim() > 1:
            start = self._start((name, "out"), axis_of(module, "out").size) + slab.offset
            dim = slab.dim
        elif attends or sides(module) or not parameter.dim():
            return _zeros(parameter)  # biases and norms: their layers are followed
        else:
            dim = _head_dim(parameter, module)
            axis: Axis = (join(name, own), "both")
            self.lone[axis] = (module, dim)
            start = self._start(axis, parameter.shape[dim])
        size = parameter.shape[dim]
        ids = self.labels.of_channels(start, size)
        return ids.view([size if place == dim else 1 for place in range(parameter.dim())]).expand(parameter.shape)

    def _start(self, axis: Axis, size: int) -> int:
        if axis not in self._starts:
            self._starts[axis] = len(self.slots)
            self.slots += [Slot(axis, channel) for channel in range(size)]
        return self._starts[axis]

    # --- functions ----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is Tensor.__setitem__:
            self._write(*args)
            return result
        made = [leaf for leaf in tensors_in(result) if leaf.is_floating_point()]
        read = tensors_in((args, kwargs))
        if not made or not any(self._followed(tensor) for tensor in read):
            return result
        try:
            labels = self._result(func, args, kwargs, result)
        except (RuntimeError, ValueError, TypeError, IndexError):
            labels = None  # a use of the function that is not known here
        found = tensors_in(labels)
        if len(found) != len(made) or any(a.shape != b.shape for a, b in zip(found, made, strict=False)):
            found = [torch.full(tensor.shape, EVERYTHING) for tensor in made]
        for tensor, own in zip(made, found, strict=True):
            self._known[id(tensor)] = (tensor, own)
        if bare_name(func) in _TURNS and read[0].dim() == 2 and id(read[0]) in self._owners:
            self._turned[id(result)] = self._owners[id(read[0])]
        return result

    def _result(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        name = bare_name(func)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        product = product_of(func, args, kwargs)
        if product is not None and not product.turned:
            return self._layer(product.inputs, product.weight, product.bias, result)
        if func is F.embedding:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return self._of(weight)[0].expand(result.shape)
        if func in _PRODUCTS:
            return self._product(args[0], args[1], result)
        if func in _BIASED_PRODUCTS:
            given = [*args[1:], *(kwargs[name] for name in ("mat1", "batch1", "mat2", "batch2") if name in kwargs)]
            return self._product(given[0], given[1], result)
        if name == "einsum":
            equation, one, two = args if len(args) == 3 else (args[0], *args[1])
            return self._products.of_einsum(equation, self._of(one), self._of(two))
        if name in FILLING:
            return _zeros(result)
        if name in MOVING:
            return func(*tree_map(self._moved, args), **tree_map(self._moved, kwargs))
        if name in ELEMENTWISE or func in DROPOUTS:
            own = args[:1] if name in CASTS else (args, kwargs)
            parts = tensors_in(own)
            return self.labels.elementwise(*(self._of(part) for part in parts if part.is_floating_point())).expand(
                result.shape
            )
        first = args[0] if args else kwargs["input"]
        if name in MIXING:
            return self._mixed(self._of(first), mixed_dims(name, args, kwargs, first.dim())).expand(result.shape)
        if name in REDUCING:
            mixed = self._mixed(self._of(first), mixed_dims(name, args, kwargs, first.dim()))
            return mixed.reshape(result.shape)
        return None

    def _moved(self, value: Any) -> Any:
        return self._of(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _mixed(self, labels: Tensor, dims: list[int]) -> Tensor:
        for dim in dims:
            labels = self.labels.joined_along(labels, dim)
        return labels

    def _write(self, target: Tensor, index: Any, value: Any) -> None:
        if target.is_floating_point():
            labels = self._of(target).clone()
            labels[index] = self._of(value).to(labels) if isinstance(value, Tensor) else NOTHING
            self._known[id(target)] = (target, labels)

    # --- layers and products ------------------------------------------------------------------------------------------

    def _layer(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> Tensor | None:
        """Follows a linear layer or a convolution: reads the labels of its inputs, gives its outputs its weight's."""
        name, module, own = self._owners.get(id(weight), ("", None, ""))
        if module is not None and own == "weight" and "in" in sides(module):
            place = -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
            self._read((name, "in"), self._of(inputs).movedim(place, -1))
        if isinstance(module, _ConvNd) and module.transposed:
            return None
        made = self._of(weight).flatten(1)[:, 0]
        if bias is not None and bool(self._of(bias).any()):
            for own, added in zip(made.tolist(), self._of(bias).tolist(), strict=True):
                self.biases |= dict.fromkeys(self.labels[own].direct, sorted(self.labels[added].direct))
            made = self.labels.elementwise(made, self._of(bias))
        return made.view(-1, *[1] * (weight.dim() - 2)).expand(result.shape)

    def _read(self, axis: Axis, labels: Tensor) -> None:
        joined = self._mixed(labels.reshape(-1, labels.shape[-1]), [0])[0].tolist()
        before = self.reads.get(axis)
        self.reads[axis] = (
            joined if before is None else [self.labels.join(pair) for pair in zip(before, joined, strict=True)]
        )

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> Tensor | None:
        name, module, own = self._turned.get(id(right), ("", None, ""))
        if module is not None and own == "weight" and "in" in sides(module) and right.dim() == 2:
            self._read((name, "in"), self._of(left))
            return self._of(right)[0].expand(result.shape)
        if left.dim() < 2 or right.dim() < 2:
            return None
        return self._products.of_matrices(self._of(left), self._of(right)).expand(result.shape)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        queries, keys, values = self._of(query), self._of(key), self._of(value)
        if enable_gqa:
            repeats = queries.shape[-3] // keys.shape[-3]
            keys, values = (labels.repeat_interleave(repeats, -3) for labels in (keys, values))
        scores = self._products.of_matrices(queries, keys.mT)
        if attn_mask is not None and attn_mask.is_floating_point():
            scores = self.labels.elementwise(scores, self._of(attn_mask))
        return self._products.of_matrices(self._mixed(scores, [-1]).expand(scores.shape), values)


def _beside_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns buffers that are vectors as long as parameters beside them, as the bias of BEiT's keys is."""
    lengths = {len(own) for own in module._parameters.values() if own is not None and own.dim() == 1}
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dim() == 1 and len(buffer) in lengths
    ]


def _head_dim(parameter: Tensor, module: nn.Module) -> int:
    """Returns the dimension of a lone parameter that heads may lie along: a table has a column for each."""
    counts = {size for name, size in head_sizes(module).items() if name in HEAD_SIZES["heads"]}
    alike = [place for place, size in enumerate(parameter.shape) if size in counts]
    wide = [place for place, size in enumerate(parameter.shape) if size > 1]
    is_table = bool(wide) and wide[0] == parameter.dim() - 2  # as of positions, (1, tokens, channels)
    return (alike or wide or [0])[-1 if is_table else 0]


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.long).expand(tensor.shape)
