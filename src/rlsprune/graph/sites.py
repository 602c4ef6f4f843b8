"""The batch norms, the sum and the clipping that each layer's output goes through at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from rlsprune.model.calls import ExampleInputs, as_call, batch_size, explained_run, output_tensors
from rlsprune.model.product import product_of
from rlsprune.model.tensors import tensors_in

__all__ = ["Site", "find_sites", "is_sum", "layer_names", "norm_of"]

_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous}
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


@dataclass(frozen=True)
class Site:
    """One call of one layer."""

    layer: str
    """Name of the module."""
    call: int
    """Number of the call: 0 for the first in a forward of any layer with the same weight."""
    norms: tuple[str, ...]
    """Names of the batch norms that its output goes through at once, if nothing else reads it."""
    sums: bool
    """Whether their result is added to something of the same shape, which is known then."""
    low: float
    """Lower bound that the result is clipped to, as by a ReLU; −∞ if it is not."""
    high: float
    shared: bool
    """Whether other calls use the weight too, or another layer has it or the bias."""
    size: int
    """Entries of its input and its output, for one input of the network."""
    layer_norm: str | None = None
    """Name of the layer norm that the result goes into, if nothing else reads it."""

    @property
    def key(self) -> tuple[str, int]:
        """Returns a key that tells the calls of one forward apart."""
        return self.layer, self.call


@dataclass
class _Operation:
    function: Callable[..., Any]
    reads: list[int]
    makes: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sums: bool
    keeps_rows: bool
    layer: str | None = None
    linear: bool = False
    norm: str | None = None
    size: int = 0


def find_sites(model: nn.Module, example_inputs: ExampleInputs) -> dict[tuple[str, int], Site]:
    """Runs the network once, in the mode it is in, and finds what follows each call of a layer, in call order."""
    trace = _Trace(model, batch_size(example_inputs))
    args, kwargs = as_call(example_inputs)
    with torch.no_grad(), explained_run(args, kwargs, "a batch"), trace:
        output = model(*args, **kwargs)
    for tensor in output_tensors(output):
        trace.readers.setdefault(trace.node(tensor), []).append(None)
    calls = Counter(operation.layer for operation in trace.operations if operation.layer is not None)
    tied = _tied(model)
    norm_calls = Counter(operation.norm for operation in trace.operations)
    for operation in trace.operations:
        if operation.norm in tied or norm_calls[operation.norm] > 1:
            operation.norm = None  # a shift for one layer would move the outputs of another
    seen: Counter[str] = Counter()
    drafts: list[tuple[Site, _Operation | None]] = []
    for operation in trace.operations:
        if operation.layer is None:
            continue
        site, adding = _follow(
            trace, operation, seen[operation.layer], calls[operation.layer] > 1 or operation.layer in tied
        )
        seen[operation.layer] += 1
        drafts.append((site, adding))
    # Of the summands of one sum, the one that is computed last makes up for the others.
    last = {id(adding): site.key for site, adding in drafts if adding is not None and not site.shared}
    sites = {}
    for site, adding in drafts:
        sums = adding is not None and last.get(id(adding)) == site.key
        low, high = (site.low, site.high) if sums or adding is None else (-math.inf, math.inf)
        layer_norm = site.layer_norm if sums or adding is None else None
        sites[site.key] = replace(site, sums=sums, low=low, high=high, layer_norm=layer_norm)
    return sites


def layer_names(model: nn.Module) -> dict[int, str]:
    """Returns id of a weight → the first module that has it as a plain parameter."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            names.setdefault(id(weight), name)
    return names


def norm_of(model: nn.Module) -> dict[int, str]:
    """Returns id of a running mean → the batch norm that has it."""
    return {
        id(module.running_mean): name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def is_sum(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors of the same shape are added."""
    tensors = [value for value in args if isinstance(value, Tensor)]  # the replay looks for them by place
    return (
        function in _SUMS
        and len(tensors) == len(args) == 2
        and tensors[0].shape == tensors[1].shape
        and kwargs.get("alpha", 1) == 1
        and kwargs.get("out") is None
    )


def keeps_rows(function: Callable[..., Any], args: tuple[Any, ...], result: object) -> bool:
    """Whether the rows of a linear layer's output are only put into another shape."""
    return function in _VIEWS and isinstance(result, Tensor) and args[0].shape[-1:] == result.shape[-1:]


def add_as(function: Callable[..., Any], target: Tensor, result: Tensor) -> Tensor:
    """Returns the result of a sum, written to the first summand where the function works in place."""
    return target.copy_(result) if function in _IN_PLACE else result


def _tied(model: nn.Module) -> set[str]:
    """Returns the names of the modules that share a parameter with another module."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


class _Trace(TorchFunctionMode):
    """Records what every function reads and makes. A tensor that is changed in place is a new node."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self._batch = max(batch, 1)
        self.operations: list[_Operation] = []
        self.readers: dict[int, list[_Operation | None]] = {}
        """Node → the operations that read it; None for the network's caller."""
        self._layers, self._norms = layer_names(model), norm_of(model)
        self._nodes: dict[int, int] = {}
        # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
        self._kept: list[Tensor] = []
        self._count = 0

    def layer_norm(self, operation: _Operation | None) -> str | None:
        """Returns the name of the module of a call, if it is a layer norm."""
        if operation is None or operation.function is not F.layer_norm:
            return None
        weight = _argument(operation.args, operation.kwargs, 2, "weight", None)
        return self._layers.get(id(weight)) if weight is not None else None

    def node(self, tensor: Tensor) -> int:
        """Returns the number of a tensor as it is now."""
        if id(tensor) not in self._nodes:
            self._renew(tensor)
        return self._nodes[id(tensor)]

    def _renew(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self._count += 1
        self._nodes[id(tensor)] = self._count
        return self._count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        reads = [self.node(tensor) for tensor in tensors]
        summing = is_sum(func, args, kwargs)
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if not made:
            return result
        nodes = [self._renew(tensor) for tensor in made]
        operation = _Operation(func, reads, nodes[0], args, kwargs, summing, keeps_rows(func, args, made[0]))
        product = product_of(func, args, kwargs)
        if product is not None and id(product.weight) in self._layers:
            operation.layer, operation.linear = self._layers[id(product.weight)], not product.dims
            operation.size = (product.inputs.numel() + made[0].numel()) // self._batch
        if func is F.batch_norm and not _argument(args, kwargs, 5, "training", False):
            operation.norm = self._norms.get(id(_argument(args, kwargs, 1, "running_mean", None)))
        self.operations.append(operation)
        for node in dict.fromkeys(reads):
            self.readers.setdefault(node, []).append(operation)
        return result


def _follow(trace: _Trace, operation: _Operation, call: int, shared: bool) -> tuple[Site, _Operation | None]:
    """Returns the site of a layer's call, and the sum that its output goes into."""
    assert operation.layer is not None
    node, adding, reshaped = operation.makes, None, False
    norms: list[str] = []
    while (reader := _only_reader(trace, node)) is not None and reader.reads[0] == node:
        if operation.linear and reader.keeps_rows and not norms:
            reshaped = True
        elif reader.norm is not None and not reshaped:
            norms.append(reader.norm)
        elif reader.function not in DROPOUTS or _argument(reader.args, reader.kwargs, 2, "training", True):
            break
        node = reader.makes
    if reader is not None and reader.sums:
        adding, node = reader, reader.makes
        reader = _only_reader(trace, node)
    low, high = _clips(reader)
    layer_norm = trace.layer_norm(reader)
    return Site(operation.layer, call, tuple(norms), False, low, high, shared, operation.size, layer_norm), adding


def _only_reader(trace: _Trace, node: int) -> _Operation | None:
    readers = trace.readers.get(node, [])
    return readers[0] if len(readers) == 1 else None


def _clips(operation: _Operation | None) -> tuple[float, float]:
    if operation is None:
        return -math.inf, math.inf
    if operation.function in _RELUS:
        return 0.0, math.inf
    if operation.function is F.relu6:
        return 0.0, 6.0
    if operation.function in (F.hardtanh, F.hardtanh_):
        low = _argument(operation.args, operation.kwargs, 1, "min_val", -1.0)
        return float(low), float(_argument(operation.args, operation.kwargs, 2, "max_val", 1.0))
    return -math.inf, math.inf


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)
