"""Names of torch's functions, by what they do to the entries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CASTS", "ELEMENTWISE", "FILLING", "MIXING", "MOVING", "REDUCING", "bare_name", "mixed_dims"]

MOVING = set(
    """
    view reshape transpose permute contiguous flatten unflatten squeeze unsqueeze expand expand_as repeat
    repeat_interleave chunk split unbind __getitem__ narrow select clone index_select movedim swapaxes swapdims
    moveaxis cat stack concat roll flip pad tensor_split view_as reshape_as tile t hstack vstack split_with_sizes
    broadcast_to detach rot90 adjoint gather unfold take_along_dim concatenate unsafe_chunk mT T
    """.split()  # noqa: SIM905
)
ELEMENTWISE = set(
    """
    add sub mul div true_divide neg pow sqrt rsqrt exp relu gelu silu sigmoid tanh where masked_fill clamp clip
    abs square rsub subtract multiply divide elu to float half bfloat16 double type type_as hardswish leaky_relu
    softplus log mish relu6 cos sin addcmul lerp maximum minimum nan_to_num reciprocal erf hardtanh dropout
    dropout1d dropout2d alpha_dropout requires_grad hardsigmoid logsigmoid celu selu clamp_min clamp_max cpu cuda
    prelu exp2 sign
    """.split()  # noqa: SIM905
)
CASTS = {"to", "type", "type_as"}  # to the dtype or device of another tensor
MIXING = {"softmax", "log_softmax", "cumsum", "layer_norm", "rms_norm", "normalize", "_safe_softmax"}
FILLING = set("new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like".split())  # noqa: SIM905
REDUCING = {"mean", "sum", "amax", "amin", "var", "std", "norm", "logsumexp", "vector_norm"}


def bare_name(func: Callable[..., Any]) -> str:
    """Returns the name of a function, method or property, the same for its in-place and reflected forms."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__getitem__":
        return name
    if name.startswith("__"):
        bare = name.strip("_")
        bare = bare if bare in ELEMENTWISE else bare[1:] if bare[:1] in "ri" else bare
        return {"truediv": "div", "itruediv": "div", "rtruediv": "div"}.get(bare, bare)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def mixed_dims(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[int]:
    """Returns the dimensions that a function mixes."""
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return list(range(-len(shape), 0))
    default = 1 if name == "normalize" else None
    place = 2 if name in ("normalize", "norm", "vector_norm") else 1
    dim = args[place] if len(args) > place else kwargs.get("dim", default)
    dims = list(range(count)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [place % count for place in dims]
