"""Rules for each function of torch, which moves channels, carries them, reads them, or mixes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsprune.graph.carrying import halved, layer_normalised, normalised, pointwise, spatial, within
from rlsprune.graph.fields import Labelled
from rlsprune.graph.function_call import FunctionCall, UnknownFunctionError
from rlsprune.graph.moving import MOVES, joined, moved
from rlsprune.graph.reading import attention, convolved, looked_up, product

__all__ = ["apply_rule"]


def apply_rule(operation: FunctionCall) -> list[Labelled]:
    """Returns the labels of the function's results.

    Raises:
        UnknownFunctionError: No rule is known.
    """
    name = operation.name
    if name in MOVES:
        return moved(operation)
    if rule := _RULES.get(name):
        return [rule(operation)]
    if name.startswith(_SPATIAL):
        return [spatial(operation)]
    if torch.Tag.pointwise in operation.function.tags:
        return [pointwise(operation)]
    if name.startswith("_scaled_dot_product"):
        return [attention(operation)]
    tensors = [value for value in operation.arguments.values() if isinstance(value, Tensor)]
    if [tensor.shape for tensor in tensors] == [result.shape for result in operation.results]:
        # A function from one tensor to one like it works channel by channel, as the verification will show.
        return [operation.labels_of(tensors[0])]
    raise UnknownFunctionError


def _nothing(_: FunctionCall) -> Labelled:
    return Labelled()


_RULES: dict[str, Callable[[FunctionCall], Labelled]] = {
    **dict.fromkeys(("cat", "stack"), joined),
    **dict.fromkeys(("_prelu_kernel", "copy", "native_dropout", "masked_fill", "where", "addcmul", "lerp"), pointwise),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "native_group_norm"),
        ),
        normalised,
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), layer_normalised),
    "glu": halved,
    **dict.fromkeys(
        (
            *("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "norm", "prod", "any"),
            *("linalg_vector_norm", "logsumexp", "argmax", "argmin", "all", "median", "cumsum", "cumprod", "aminmax"),
            *("_softmax", "_log_softmax", "sort", "topk", "argsort", "logcumsumexp"),
        ),
        within,
    ),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), product),
    "convolution": convolved,
    "embedding": looked_up,
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
