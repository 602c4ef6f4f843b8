"""One run of the network in which every entry of every tensor knows the channels that it was made from.

A function that moves entries moves their labels; one that computes entry by entry joins them; a linear or convolution
layer reads the labels of its inputs and gives its outputs new ones. Of a product of two such tensors, as of queries and
keys, it is remembered which channels were multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rlsprune.graph.function_names import CASTS, ELEMENTWISE, FILLING, MIXING, MOVING, REDUCING, bare_name, mixed_dims
from rlsprune.graph.labels import EVERYTHING, NOTHING, Label, LabelSets, broadcast, is_constant
from rlsprune.graph.layers import axis_of, join, sides
from rlsprune.graph.members import Axis
from rlsprune.graph.observe import Call
from rlsprune.graph.sites import DROPOUTS
from rlsprune.model.product import product_of
from rlsprune.model.sizes import HEAD_SIZES, head_sizes

__all__ = ["Contraction", "Flow", "Slot", "follow_channels"]

_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_BIASED_PRODUCTS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm}


@dataclass(frozen=True)
class Slot:
    """One channel of one side of one layer, or of a parameter that stands by itself."""

    axis: Axis
    channel: int


@dataclass(frozen=True)
class Contraction:
    """What was multiplied and summed up to make one score: of one head."""

    left: tuple[int, ...]
    """Slots of the queries, ascending."""
    right: tuple[int, ...]
    """Slots of the keys."""
    pairs: tuple[tuple[int, int], ...] | None
    """Slots that met each other, one by one; None where an entry was made of several, as by a rotation."""


@dataclass
class Flow:
    """What a run showed."""

    labels: LabelSets
    slots: list[Slot]
    lone: dict[Axis, tuple[nn.Module, int]]
    """Parameters that stand by themselves: the module that owns each, and the dimension that its channels lie along."""
    reads: dict[Axis, list[int]]
    """The inputs of a layer → the label of each."""
    contractions: list[Contraction]
    biases: dict[int, list[int]]
    """Slot of a layer's output → slots of lone parameters that are its bias."""


def follow_channels(model: nn.Module, call: Call) -> Flow:
    """Runs the network once, in the mode it is in. If it does not run again, nothing is known of its attention."""
    watch = _Watch(model)
    try:
        with torch.no_grad(), watch:
            model(*call.args, **call.kwargs)
    except Exception:
        watch.contractions.clear()
    contractions = list(dict.fromkeys(watch.contractions))
    return Flow(watch.labels, watch.slots, watch.lone, watch.reads, contractions, watch.biases)


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.labels, self.slots, self.lone = LabelSets(), list[Slot](), dict[Axis, tuple[nn.Module, int]]()
        self.reads: dict[Axis, list[int]] = {}
        self.contractions: list[Contraction] = []
        self.biases: dict[int, list[int]] = {}
        self._starts: dict[Axis, int] = {}
        self._owners = {
            id(parameter): (name, module, own)
            for name, module in model.named_modules()
            for own, parameter in (*module._parameters.items(), *_beside_parameters(module))
            if parameter is not None
        }
        # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    # --- labels of tensors --------------------------------------------------------------------------------------------

    def _of(self, tensor: Tensor) -> Tensor:
        """The labels of a tensor; a parameter gets its own when it is first used."""
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
        ids = torch.tensor([self.labels.of((slot,)) for slot in range(start, start + size)], dtype=torch.long)
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
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not made or not any(self._followed(tensor) for tensor in read):
            return result
        try:
            labels = self._result(func, args, kwargs, result)
        except (RuntimeError, ValueError, TypeError, IndexError):
            labels = None  # a use of the function that is not known here
        found = [] if labels is None else [leaf for leaf in tree_leaves(labels) if isinstance(leaf, Tensor)]
        if len(found) != len(made) or any(a.shape != b.shape for a, b in zip(found, made, strict=False)):
            found = [torch.full(tensor.shape, EVERYTHING) for tensor in made]
        for tensor, own in zip(made, found, strict=True):
            self._known[id(tensor)] = (tensor, own)
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
        if name in FILLING:
            return _zeros(result)
        if name in MOVING:
            return func(*tree_map(self._moved, args), **tree_map(self._moved, kwargs))
        if name in ELEMENTWISE or func in DROPOUTS:
            own = args[:1] if name in CASTS else (args, kwargs)
            parts = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)]
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
        """A linear layer or a convolution: reads the labels of its inputs, gives its outputs those of its weight."""
        name, module, own = self._owners.get(id(weight), ("", None, ""))
        if module is not None and own == "weight" and "in" in sides(module):
            place = -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
            self._read((name, "in"), self._of(inputs).movedim(place, -1))
        if isinstance(module, _ConvNd) and module.transposed:
            return None
        made = self._of(weight).flatten(1)[:, 0]
        if bias is not None and self._followed(bias):
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
        name, module, own = self._owners.get(id(right), ("", None, ""))
        if module is not None and own == "weight" and "in" in sides(module) and right.dim() == 2:
            # Of a layer that keeps its weight as (inputs, outputs).
            self._read((name, "in"), self._of(left))
            return self._of(right)[0].expand(result.shape)
        if left.dim() < 2 or right.dim() < 2:
            return None
        return self._matrix_product(self._of(left), self._of(right)).expand(result.shape)

    def _matrix_product(self, left: Tensor, right: Tensor) -> Tensor:
        if is_constant(left, -1) and is_constant(right, -2):
            # What is summed over is no channels but places, tokens say: the left side says how much of each.
            weights = self.labels.each(left[..., :1], self.labels.as_scores)
            return self.labels.elementwise(weights, right[..., :1, :])
        if not (is_constant(left, -2) and is_constant(right, -1)):
            raise ValueError("a product of which every entry is made from other channels")
        rows, columns = broadcast(left[..., 0, :], right[..., :, 0])
        both = torch.stack([rows, columns], -1).reshape(-1, 2 * rows.shape[-1])
        heads, back = torch.unique(both, dim=0, return_inverse=True)
        found = torch.tensor([self._contract(head) for head in heads.tolist()], dtype=torch.long)
        return found[back].view(*rows.shape[:-1], 1, 1).expand(*rows.shape[:-1], left.shape[-2], right.shape[-1])

    def _contract(self, head: list[int]) -> int:
        """The label of a score, from those of the entries that meet: of a query and of a key, in turns."""
        if EVERYTHING in head:
            return EVERYTHING
        queries, keys = [self.labels[number] for number in head[::2]], [self.labels[number] for number in head[1::2]]
        left, right = self._layers_of(queries), self._layers_of(keys)
        rest = frozenset[int]().union(*(label.scores for label in queries + keys))
        own = [(self._layers_of([q]), self._layers_of([k])) for q, k in zip(queries, keys, strict=True)]
        alone = not rest and all(len(q) == len(k) == 1 for q, k in own)
        pairs = tuple((q[0], k[0]) for q, k in own) if alone else None
        if left and right:
            self.contractions.append(Contraction(tuple(left), tuple(right), pairs))
        return self.labels.of((), rest.union(*(label.direct for label in queries + keys)))

    def _layers_of(self, labels: list[Label]) -> list[int]:
        """The slots of layers, without those of lone parameters that scale them, say."""
        direct = frozenset[int]().union(*(label.direct for label in labels))
        return sorted(slot for slot in direct if self.slots[slot].axis not in self.lone) or sorted(direct)

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
        scores = self._matrix_product(queries, keys.mT)
        if attn_mask is not None and attn_mask.is_floating_point():
            scores = self.labels.elementwise(scores, self._of(attn_mask))
        return self._matrix_product(self._mixed(scores, [-1]).expand(scores.shape), values)


def _beside_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Vectors that are no parameters but stand beside some of their length, as the bias of BEiT's keys does."""
    lengths = {len(own) for own in module._parameters.values() if own is not None and own.dim() == 1}
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dim() == 1 and len(buffer) in lengths
    ]


def _head_dim(parameter: Tensor, module: nn.Module) -> int:
    """The dimension of a lone parameter that heads may lie along, if any do: a table has a column for each."""
    counts = {size for name, size in head_sizes(module).items() if name in HEAD_SIZES["heads"]}
    alike = [place for place, size in enumerate(parameter.shape) if size in counts]
    wide = [place for place, size in enumerate(parameter.shape) if size > 1]
    return (alike or wide or [0])[-1 if parameter.dim() == 2 else 0]


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.long).expand(tensor.shape)
