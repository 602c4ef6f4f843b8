"""The sizes of a layer: which attributes state them, and the shapes of its tensors that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from rlsprune.model.arguments import quoted

__all__ = ["Sizes", "check_sizes", "implied_shapes", "read_sizes", "write_sizes"]

Sizes = dict[str, int | list[int]]
Shapes = dict[str, tuple[int, ...]]


class _Kind(NamedTuple):
    types: tuple[type[nn.Module], ...]
    attributes: tuple[str, ...]
    shapes: Callable[[Any, Any], Shapes]  # (layer, sizes) → shapes of the tensors it may own


def _conv(layer: _ConvNd, sizes: dict[str, int]) -> Shapes:
    per_group = sizes["in_channels"] // sizes["groups"]
    out = sizes["out_channels"]
    return {"weight": (out, per_group, *layer.kernel_size), "bias": (out,)}


def _conv_transpose(layer: _ConvTransposeNd, sizes: dict[str, int]) -> Shapes:
    per_group = sizes["out_channels"] // sizes["groups"]
    return {"weight": (sizes["in_channels"], per_group, *layer.kernel_size), "bias": (sizes["out_channels"],)}


def _linear(_: nn.Linear, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["out_features"], sizes["in_features"]), "bias": (sizes["out_features"],)}


def _norm(_: _NormBase, sizes: dict[str, int]) -> Shapes:
    return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (sizes["num_features"],))


def _group_norm(_: nn.GroupNorm, sizes: dict[str, int]) -> Shapes:
    return dict.fromkeys(("weight", "bias"), (sizes["num_channels"],))


def _layer_norm(_: nn.Module, sizes: dict[str, list[int]]) -> Shapes:
    return dict.fromkeys(("weight", "bias"), tuple(sizes["normalized_shape"]))


def _prelu(_: nn.PReLU, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["num_parameters"],)}


def _embedding(_: nn.Module, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["num_embeddings"], sizes["embedding_dim"])}


_CHANNELS = ("in_channels", "out_channels", "groups")

# The first kind that fits is taken: transposed convolutions are convolutions too.
_KINDS = (
    _Kind((nn.Linear,), ("in_features", "out_features"), _linear),
    _Kind((_ConvTransposeNd,), _CHANNELS, _conv_transpose),
    _Kind((_ConvNd,), _CHANNELS, _conv),
    _Kind((_NormBase,), ("num_features",), _norm),
    _Kind((nn.GroupNorm,), ("num_groups", "num_channels"), _group_norm),
    _Kind((nn.LayerNorm, nn.RMSNorm), ("normalized_shape",), _layer_norm),
    _Kind((nn.PReLU,), ("num_parameters",), _prelu),
    _Kind((nn.Embedding, nn.EmbeddingBag), ("num_embeddings", "embedding_dim"), _embedding),
)
# What has to be a multiple of what.
_MULTIPLES = (("in_channels", "groups"), ("out_channels", "groups"), ("num_channels", "num_groups"))


def _kind(layer: nn.Module) -> _Kind | None:
    return next((kind for kind in _KINDS if isinstance(layer, kind.types)), None)


def read_sizes(layer: nn.Module) -> Sizes | None:
    """The layer's size attributes, or None for a module that has none that we know how to change."""
    kind = _kind(layer)
    if kind is None:
        return None
    values = {name: getattr(layer, name) for name in kind.attributes}
    return {name: list(value) if isinstance(value, tuple) else int(value) for name, value in values.items()}


def write_sizes(layer: nn.Module, sizes: Mapping[str, int | list[int]]) -> None:
    """Sets the layer's size attributes to checked sizes."""
    for name, value in sizes.items():
        setattr(layer, name, tuple(value) if isinstance(value, list) else value)


def implied_shapes(layer: nn.Module, sizes: Mapping[str, int | list[int]]) -> Shapes:
    """The shapes that the layer's tensors have at these sizes, by their names in the layer."""
    kind = _kind(layer)
    return {} if kind is None else kind.shapes(layer, sizes)


def check_sizes(layer: nn.Module, sizes: object) -> Sizes:
    """The sizes, if the layer can take them by becoming smaller.

    Raises:
        ValueError: If names or types are not those of the layer, a size is below 1 or above what it is now, or groups
            do not divide channels.
    """
    now = read_sizes(layer) or {}
    if not isinstance(sizes, dict) or set(sizes) != set(now):
        found = quoted(map(str, sizes)) or "none" if isinstance(sizes, dict) else type(sizes).__name__
        raise ValueError(f"a {type(layer).__name__} has the sizes {quoted(now)}, the file gives {found}")
    for name, most in now.items():
        _check_size(name, sizes[name], most)
    for multiple, divisor in _MULTIPLES:
        if divisor in now and multiple in now and sizes[multiple] % sizes[divisor]:
            raise ValueError(f"{multiple}={sizes[multiple]} is not a multiple of {divisor}={sizes[divisor]}")
    padding = getattr(layer, "padding_idx", None)
    if padding is not None and padding >= sizes["num_embeddings"]:
        raise ValueError(f"num_embeddings={sizes['num_embeddings']} leaves out the layer's padding_idx={padding}")
    return sizes


def _check_size(name: str, value: object, most: int | list[int]) -> None:
    if isinstance(most, list):
        if not isinstance(value, list) or len(value) != len(most):
            raise ValueError(f"{name} must be a list of {len(most)} sizes")
        for part, bound in zip(value, most, strict=True):
            _check_size(name, part, bound)
    elif type(value) is not int:  # a bool is an int to isinstance
        raise ValueError(f"{name} must be a whole number, not a {type(value).__name__}")
    elif not min(1, most) <= value <= most:
        raise ValueError(f"{name} must be between 1 and the model's {most}, not {str(value)[:20]}")
