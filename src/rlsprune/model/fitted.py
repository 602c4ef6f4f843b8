"""Modules whose code uses the width of their input as that of their heads, made to run when heads are gone.

``x.transpose(1, 2).reshape(B, N, C)`` and ``view(B, N, heads, C // heads)`` with the ``C`` of ``B, N, C = x.shape`` are
right while all heads are there. In a fitted module the last size of a view that does not fit is inferred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from rlsprune.model.tensors import replace_data

__all__ = ["Fitted", "fit_views"]

_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


class Fitted(nn.Module):
    """The base of the classes that `fit_views` makes: the module's own class, whose forward has views that fit."""

    called_layers: tuple[str, ...] = ()
    """Linear layers in it whose weights its code passes to functions: they are called instead, so that hooks run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the module's own class computes."""
        with _FittingViews([self.get_submodule(name) for name in self.called_layers]):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles by the module's own class, which can be imported."""
        return _remade, (type(self).__mro__[2],), vars(self)


class _FittingViews(TorchFunctionMode):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self._layers = {id(layer.weight): layer for layer in layers}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and len(args) > 1:
            sizes = args[1:] if isinstance(args[1], int) else args[1]
            if isinstance(sizes, Sequence) and not _fits(args[0], sizes):
                args = (args[0], (*sizes[:-1], -1))
        if func is F.linear and self._layers:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            layer = self._layers.get(id(given.get("weight")))
            if layer is not None and given.get("bias") is layer.bias:
                return layer(given["input"])
        return func(*args, **kwargs)


def _fits(tensor: Tensor, sizes: Sequence[int]) -> bool:
    return any(size == -1 for size in sizes) or math.prod(sizes) == tensor.numel()


def fit_views(module: nn.Module, called_layers: Sequence[str] = ()) -> None:
    """Fits the views of a module by changing its class, so that names, parameters and hooks stay.

    A vector of equal entries that is in no file, as BEiT's bias of keys, gets the length of the parameters beside it.

    Args:
        module: Module to change in place.
        called_layers: Names, in the module, of layers to be called where its code uses their weights in a function.
    """
    if not isinstance(module, Fitted):
        module.__class__ = _fitted(type(module))
    if called_layers:
        vars(module)["called_layers"] = tuple(called_layers)
    lengths = {len(own) for own in module._parameters.values() if own is not None and own.dim() == 1}
    buffers = [module._buffers[name] for name in module._non_persistent_buffers_set]
    for buffer in buffers if len(lengths) == 1 else ():
        longer = buffer is not None and buffer.dim() == 1 and len(buffer) > min(lengths)
        if buffer is not None and longer and bool((buffer == buffer[0]).all()):
            replace_data(buffer, buffer[: min(lengths)].clone())


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fitted(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        named = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(kind.__name__, (Fitted, kind), named)
    return _classes[kind]


def _remade(kind: type[nn.Module]) -> nn.Module:
    fitted = _fitted(kind)
    return fitted.__new__(fitted)
