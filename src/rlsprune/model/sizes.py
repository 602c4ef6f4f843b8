"""The sizes of a layer: the attributes that state them, and the shapes of its tensors that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from rlsprune.model.arguments import quoted
from rlsprune.model.attention import open_attention, value_dim
from rlsprune.model.fitted import Fitted, fit_views

__all__ = [
    "FITTED",
    "HEAD_SIZES",
    "Sizes",
    "check_sizes",
    "head_sizes",
    "implied_shapes",
    "is_experts",
    "is_newly_sized",
    "is_transposed_linear",
    "read_sizes",
    "write_sizes",
]

Sizes = dict[str, int | list[int]]
Shapes = dict[str, tuple[int, ...]]


def is_transposed_linear(layer: nn.Module) -> bool:
    """Whether a layer is the ``Conv1D`` of transformers (GPT-2): a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and all(hasattr(layer, name) for name in ("nx", "nf", "weight"))


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a mixture as transformers does: gated blocks, all in two tensors."""
    if type(vars(module).get("intermediate_dim")) is not int:
        return False
    own = dict(module.named_parameters(recurse=False))
    up, down = own.get("gate_up_proj"), own.get("down_proj")
    if len(own) != 2 or up is None or down is None:
        return False
    return up.dim() == down.dim() == 3 and up.shape == (len(down), 2 * down.shape[2], down.shape[1])


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


def _transposed_linear(_: nn.Module, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["nx"], sizes["nf"]), "bias": (sizes["nf"],)}


def _experts(layer: nn.Module, sizes: dict[str, int]) -> Shapes:
    count, outside = layer.down_proj.shape[:2]  # type: ignore[index]
    width = sizes["intermediate_dim"]
    return {"gate_up_proj": (count, 2 * width, outside), "down_proj": (count, outside, width)}


def _norm(_: _NormBase, sizes: dict[str, int]) -> Shapes:
    return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (sizes["num_features"],))


def _group_norm(_: nn.GroupNorm, sizes: dict[str, int]) -> Shapes:
    return dict.fromkeys(("weight", "bias"), (sizes["num_channels"],))


def _layer_norm(_: nn.Module, sizes: dict[str, list[int]]) -> Shapes:
    return dict.fromkeys(("weight", "bias"), tuple(sizes["normalized_shape"]))


def _prelu(_: nn.PReLU, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["num_parameters"],)}


def _recurrent(layer: nn.RNNBase, sizes: dict[str, int]) -> Shapes:
    width, ways = sizes["hidden_size"], 2 if layer.bidirectional else 1
    gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
    read = layer.proj_size or width
    shapes: Shapes = {}
    for depth in range(layer.num_layers):
        inputs = ways * read if depth else sizes["input_size"]
        for way in ("", "_reverse"):
            end = f"_l{depth}{way}"
            shapes |= {f"weight_ih{end}": (gates * width, inputs), f"weight_hh{end}": (gates * width, read)}
            shapes |= {f"bias_ih{end}": (gates * width,), f"bias_hh{end}": (gates * width,)}
            shapes[f"weight_hr{end}"] = (read, width)
    return shapes


def _embedding(_: nn.Module, sizes: dict[str, int]) -> Shapes:
    return {"weight": (sizes["num_embeddings"], sizes["embedding_dim"])}


def _attention(layer: nn.MultiheadAttention, sizes: dict[str, int]) -> Shapes:
    width, values = sizes["num_heads"] * sizes["head_dim"], sizes["num_heads"] * sizes["value_dim"]
    return {
        "in_proj_weight": (2 * width + values, layer.embed_dim),
        "in_proj_bias": (2 * width + values,),
        "q_proj_weight": (width, layer.embed_dim),
        "k_proj_weight": (width, layer.kdim),
        "v_proj_weight": (values, layer.vdim),
        "bias_k": (1, 1, width),
        "bias_v": (1, 1, values),
    }


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
    _Kind((nn.RNNBase,), ("input_size", "hidden_size"), _recurrent),
    _Kind((nn.MultiheadAttention,), ("num_heads", "head_dim", "value_dim"), _attention),
)
HEAD_SIZES: dict[str, tuple[str, ...]] = {
    "heads": (
        *("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_q_heads", "num_query_heads"),
        *("n_local_heads", "attention_heads"),
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_local_kv_heads"),
    "repeats": ("num_key_value_groups", "n_rep", "num_queries_per_kv", "q_per_kv", "kv_groups"),
    "head_dim": (
        *("head_dim", "attention_head_size", "dim_head", "d_head", "head_size", "key_value_proj_dim", "dim_per_head"),
        *("key_dim", "d_k", "head_width", "attn_head_dim", "d_kv"),
    ),
    "value_dim": ("value_dim", "v_head_dim", "d_v"),
    "width": (
        *("all_head_size", "inner_dim", "split_size", "attn_dim", "all_head_dim", "inner_size", "attention_dim"),
        *("attn_width", "q_dim", "qkv_dim"),
    ),
    "kv_width": ("kv_dim", "kv_size"),
    "outer_width": ("embed_dim", "hidden_size", "d_model", "dim", "n_embd", "embedding_dim"),
}
"""Attribute names of the sizes of an attention. An outer width may be that of its input, or that of all heads."""
FITTED = "fitted"
"""Name of a size of an attention: 1 if its views have to be fitted, as after heads were removed."""
_HEAD_NAMES = tuple(name for names in HEAD_SIZES.values() for name in names)
# Pairs of a size and its divisor.
_MULTIPLES = (("in_channels", "groups"), ("out_channels", "groups"), ("num_channels", "num_groups"))


_TRANSPOSED_LINEAR = _Kind((), ("nx", "nf"), _transposed_linear)
_EXPERTS = _Kind((), ("intermediate_dim",), _experts)


def _kind(layer: nn.Module) -> _Kind | None:
    if is_transposed_linear(layer):
        return _TRANSPOSED_LINEAR
    if is_experts(layer):
        return _EXPERTS
    return next((kind for kind in _KINDS if isinstance(layer, kind.types)), None)


def read_sizes(layer: nn.Module) -> Sizes | None:
    """Returns the layer's size attributes, or None for a module that has none that we know how to change."""
    kind = _kind(layer)
    if kind is None:
        return {**head_sizes(layer), **({FITTED: 1} if isinstance(layer, Fitted) else {})} or None
    if isinstance(layer, nn.MultiheadAttention):
        return {"num_heads": layer.num_heads, "head_dim": layer.head_dim, "value_dim": value_dim(layer)}
    values = {name: getattr(layer, name) for name in kind.attributes}
    return {name: list(value) if isinstance(value, tuple) else int(value) for name, value in values.items()}


def head_sizes(module: nn.Module) -> Sizes:
    """Returns the attributes of a module that are named like the sizes of an attention."""
    own = vars(module)
    return {name: own[name] for name in _HEAD_NAMES if type(own.get(name)) is int}


def is_newly_sized(layer: nn.Module) -> bool:
    """Whether a layer is an attention, a recurrent layer or experts, whose sizes are not in files of 0.1.0."""
    kind = _kind(layer)
    return kind in (None, _EXPERTS) or not {nn.MultiheadAttention, nn.RNNBase}.isdisjoint(kind.types)


def write_sizes(layer: nn.Module, sizes: Mapping[str, int | list[int]]) -> None:
    """Sets the layer's size attributes to checked sizes."""
    if isinstance(layer, nn.MultiheadAttention) and (read_sizes(layer) or {}) != {**(read_sizes(layer) or {}), **sizes}:
        open_attention(layer)
    if sizes.get(FITTED):
        fit_views(layer)
    for name, value in sizes.items():
        if name != FITTED:
            setattr(layer, name, tuple(value) if isinstance(value, list) else value)


def implied_shapes(layer: nn.Module, sizes: Mapping[str, int | list[int]]) -> Shapes:
    """Returns the shapes that the layer's tensors have at these sizes, by their names in the layer."""
    kind = _kind(layer)
    return {} if kind is None else kind.shapes(layer, sizes)


def check_sizes(layer: nn.Module, sizes: object) -> Sizes:
    """Returns the sizes if the layer can take them by becoming smaller.

    Raises:
        ValueError: If names or types are not those of the layer, a size is below 1 or above what it is now, or groups
            do not divide channels.
    """
    now = read_sizes(layer) or {}
    if isinstance(sizes, dict) and (FITTED in now or (head_sizes(layer) and _kind(layer) is None)):
        # A fresh layer is not fitted yet.
        now, sizes = {**now, FITTED: 1}, {FITTED: 0, **sizes}
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
    elif not (0 if name == FITTED else min(1, most)) <= value <= most:
        raise ValueError(f"{name} must be between 1 and the model's {most}, not {str(value)[:20]}")
