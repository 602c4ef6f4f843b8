"""The input selector, with which a pruned model takes the same inputs as before and picks the features it kept.

The selector is a buffer, `kept_inputs`, and a forward pre-hook on the `Linear` layer that reads the raw features. The
names of the parameters stay as they were; the state dict gains one name. Forward hooks see the picked features.

Picking takes about 3 µs of a call on a CPU, at batch 1 as at 64: 1 µs is the gather (a slice of contiguous features is
no faster), the rest is how torch calls hooks. A network whose call takes 10 µs is better stripped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.model.calls import bare_copy

__all__ = [
    "KEPT_INPUTS",
    "check_kept",
    "full_in_features",
    "kept_features",
    "kept_inputs",
    "select_inputs",
    "set_kept_inputs",
    "strip_inputs",
]

KEPT_INPUTS = "kept_inputs"
"""Name of the buffer with the indices of the kept features among the original ones: int64, ascending."""

_FULL_WIDTH = "full_in_features"


def select_inputs(layer: nn.Linear, kept: Tensor | Sequence[int]) -> None:
    """Makes a layer pick `kept` from the features that it takes now. The caller slices its weight afterwards.

    Called again, the indices count the features kept so far; the buffer always holds indices of the original ones.

    Args:
        layer: A layer that reads input features, before the columns of its weight are sliced.
        kept: Ascending indices below `layer.in_features`. With all of them, nothing changes.

    Raises:
        ValueError: If the indices are empty, out of range, not ascending or repeated.
    """
    chosen = check_kept(kept, layer.in_features)
    if len(chosen) == layer.in_features:
        return
    before = kept_inputs(layer)
    width = full_in_features(layer)
    set_kept_inputs(layer, chosen if before is None else before.cpu()[chosen], width)


def set_kept_inputs(layer: nn.Linear, kept: Tensor | Sequence[int] | None, width: int | None = None) -> None:
    """Installs a selector of these original features, or removes it.

    Args:
        layer: The layer that reads the features.
        kept: Ascending indices of the original features, or None to remove the selector.
        width: Number of original features; None for the present number.
    """
    if kept is None:
        _remove(layer)
        return
    width = full_in_features(layer) if width is None else width
    chosen = check_kept(kept, width).to(layer.weight.device)
    if kept_inputs(layer) is None:
        if hasattr(layer, KEPT_INPUTS):
            raise ValueError(
                f"{layer} has an attribute {KEPT_INPUTS!r} of its own, the name the input selector needs: rename it"
            )
        layer.register_forward_pre_hook(_select)
    layer.register_buffer(KEPT_INPUTS, chosen)
    setattr(layer, _FULL_WIDTH, width)


def kept_features(model: nn.Module) -> dict[str, list[int]]:
    """Returns the original input features that a pruned model still reads, by the layer that selects them.

    The result is empty if the model reads all of them.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> set_kept_inputs(model[0], [0, 3])
        >>> kept_features(model)
        {'0': [0, 3]}
    """
    kept = {name: kept_inputs(module) for name, module in model.named_modules()}
    return {name: indices.tolist() for name, indices in kept.items() if indices is not None}


def kept_inputs(layer: nn.Module) -> Tensor | None:
    """Returns the indices of the original features that the layer picks, or None if it takes its input as it comes."""
    if _select not in layer._forward_pre_hooks.values():
        return None
    return layer.get_buffer(KEPT_INPUTS)


def full_in_features(layer: nn.Linear) -> int:
    """Returns the number of features in the layer's input, before its selector if it has one."""
    width: int = layer.in_features if kept_inputs(layer) is None else getattr(layer, _FULL_WIDTH)
    return width


def strip_inputs(model: nn.Module) -> nn.Module:
    """Makes a deep copy whose layers take only the kept features: the caller selects them, `x[..., kept]`.

    The copy has none of this package's training hooks. Adapt a forward that hard-codes the number of features, such
    as `x.view(-1, 784)`.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 2)
        >>> select_inputs(layer, [0, 3])
        >>> layer.weight.data, layer.in_features = layer.weight.data[:, [0, 3]], 2
        >>> x = torch.randn(5, 4)
        >>> torch.equal(strip_inputs(layer)(x[:, [0, 3]]), layer(x))
        True
    """
    stripped = bare_copy(model)
    for module in stripped.modules():
        _remove(module)
    return stripped


def _select(self: Any, input: tuple[Tensor]) -> tuple[Tensor]:  # noqa: A002 (the names of a scripted hook)
    """Picks the kept features, as a forward pre-hook.

    It is a plain function, so it is pickled and copied by name, and every compiler traces it. Its names and types are
    those that `torch.jit.script` asks of a hook. The buffer is read as an attribute: `get_buffer` takes longer than the
    gather.
    """
    if len(input) == 0:
        raise TypeError("a layer with pruned inputs takes its input as first argument, not by name: call layer(x)")
    features = input[0]
    if features.size(-1) != self.full_in_features:
        raise ValueError(
            f"the layer keeps {self.kept_inputs.numel()} of {self.full_in_features} input features and selects them "
            f"itself: its input must have {self.full_in_features} features, not {features.size(-1)}; "
            f"strip_inputs(model) takes only the {self.kept_inputs.numel()}"
        )
    return (features.index_select(-1, self.kept_inputs),)


def _remove(layer: nn.Module) -> None:
    if kept_inputs(layer) is None:
        return
    key = next(key for key, hook in layer._forward_pre_hooks.items() if hook is _select)
    del layer._forward_pre_hooks[key]
    delattr(layer, KEPT_INPUTS)
    delattr(layer, _FULL_WIDTH)


def check_kept(kept: Tensor | Sequence[int], width: int) -> Tensor:
    """Returns the indices as a new int64 tensor on the CPU.

    Raises:
        ValueError: If they are empty, not integers, outside `width`, not ascending or repeated.
    """
    chosen = torch.as_tensor(kept)
    if chosen.dim() != 1 or not chosen.numel():
        raise ValueError(f"kept inputs of shape {tuple(chosen.shape)}: give a list of at least one index")
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool:
        raise ValueError(f"kept inputs are {chosen.dtype}: give integer indices")
    chosen = chosen.detach().to("cpu", torch.int64, copy=True)
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= width:
        raise ValueError(f"kept inputs go from {low} to {high}: they must be in 0…{width - 1}")
    if bool((chosen[1:] <= chosen[:-1]).any()):
        raise ValueError("kept inputs are not in ascending order, each once: sort them and drop repetitions")
    return chosen
