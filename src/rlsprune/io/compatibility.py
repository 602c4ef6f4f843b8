"""Checks that a file fits a model. All of them run before the model changes.

The content of the file is untrusted; it is compared with the model. Each check raises a `ValueError` that names the
problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rlsprune.io.tensorfile import DTYPES, Entry
from rlsprune.model.arguments import quoted
from rlsprune.model.selector import KEPT_INPUTS, full_in_features, kept_inputs
from rlsprune.model.sizes import Sizes, check_sizes, implied_shapes, is_newly_sized, read_sizes

__all__ = [
    "check_inputs",
    "check_names",
    "check_selector",
    "check_sized_layers",
    "check_tensors",
    "has_data",
    "named_tensors",
    "selector_name",
    "sized_layers",
]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and persistent buffers by name. One with several names appears under each.

    Raises:
        ValueError: A module keeps state that is not a tensor.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{prefix or 'the model'} keeps extra state besides its tensors: only tensors go into a file"
            )
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has data; parameters of lazy modules and tensors on the meta device have none."""
    return not (is_lazy(tensor) or tensor.is_meta)


def sized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers whose sizes can be changed, by name."""
    return {name: module for name, module in model.named_modules() if read_sizes(module) is not None}


def selector_name(layer: str) -> str:
    """Returns the name of a layer's kept inputs among the tensors."""
    return f"{layer}.{KEPT_INPUTS}" if layer else KEPT_INPUTS


def check_sized_layers(given: Mapping[str, object], layers: Mapping[str, nn.Module]) -> dict[str, Sizes]:
    """Returns the file's sizes for each layer. The model must have the same layers, and they must shrink to them."""
    # Files of earlier versions have no sizes of recurrent layers. They and files of models that know their heads by
    # other means have none of attention.
    silent = {name: read_sizes(layer) for name, layer in layers.items() if name not in given and is_newly_sized(layer)}
    given = {**given, **silent}
    _check_same("layers", given, layers)
    sizes = {}
    for name, layer in layers.items():
        try:
            sizes[name] = check_sizes(layer, given[name])
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    return sizes


def check_inputs(given: Mapping[str, object], layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """Returns the width of the input before the selector, for each layer that has a selector in the file."""
    widths = {}
    for name, width in given.items():
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"it has kept inputs for {quoted([name])}, which is not a Linear layer of the model")
        if type(width) is not int or width != full_in_features(layer):
            found = str(width)[:20]
            raise ValueError(
                f"layer {name!r} took {full_in_features(layer)} features in the model, {found} in the file"
            )
        widths[name] = width
    for name, layer in layers.items():
        if kept_inputs(layer) is not None and name not in widths:
            raise ValueError(
                f"layer {name!r} of the model has an input selector, the file has none: load a fresh model"
            )
    return widths


def check_names(stored: Iterable[str], aliases: Mapping[str, object], own: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each name in the model to the name in the file whose tensor it takes, without kept inputs.

    Args:
        stored: The names of the tensors in the file.
        aliases: Further name → the name in the file whose tensor it shares.
        own: The tensors of the model.
    """
    sources = {name: name for name in stored}
    for name, source in aliases.items():
        if name in sources or not isinstance(source, str) or sources.get(source) != source:
            raise ValueError(f"its alias {quoted([name])} is not another name of a stored tensor")
    sources |= {name: str(source) for name, source in aliases.items()}
    _check_same("tensors", sources, own)
    taken: dict[int, str] = {}
    for name, tensor in own.items():
        first = taken.setdefault(id(tensor), name)
        if sources[first] != sources[name]:
            raise ValueError(f"the model has one tensor for {first!r} and {name!r}, the file has two")
    return sources


def check_tensors(
    entries: Mapping[str, Entry],
    own: Mapping[str, Tensor],
    model: nn.Module,
    sizes: Mapping[str, Sizes],
) -> None:
    """Checks type and shape of the file's tensor for each name of the model.

    Args:
        entries: The file's entry for each name.
        own: The tensors of the model.
        model: The model.
        sizes: The checked sizes of its layers. A layer with several names has them under the first.
    """
    by_layer = {id(layer): sizes[name] for name, layer in sized_layers(model).items()}
    for name, tensor in own.items():
        entry = entries[name]
        if entry.get_dtype() != DTYPES.get(tensor.dtype):
            raise ValueError(f"{name!r} is {entry.get_dtype()} in the file and {tensor.dtype} in the model")
        found, most = tuple(entry.get_shape()), tuple(tensor.shape)
        prefix, _, local = name.rpartition(".")
        module = model.get_submodule(prefix)
        implied = implied_shapes(module, by_layer[id(module)]) if id(module) in by_layer else {}
        if local in implied:
            if found != implied[local]:
                raise ValueError(f"{name!r} has shape {found}, the layer's sizes in the file imply {implied[local]}")
        elif found != most and type(module).__module__.startswith("torch."):
            kind = type(module).__name__
            raise ValueError(f"{name!r} is {found} in the file and {most} in the model, whose {kind} cannot be resized")
        if len(found) != len(most) or any(not min(1, b) <= size <= b for size, b in zip(found, most, strict=True)):
            raise ValueError(f"{name!r} is {found} in the file, which does not fit into the model's {most}")


def check_selector(layer: str, entry: Entry | None, count: object = None) -> None:
    """Checks type and shape of a layer's kept inputs; `count` is the required number, if known."""
    shape = [] if entry is None else entry.get_shape()
    if entry is None or entry.get_dtype() != DTYPES[torch.int64] or len(shape) != 1 or count not in (None, shape[0]):
        raise ValueError(f"the kept inputs of layer {quoted([layer])} are not a list of {count or 'its'} indices")


def _check_same(what: str, given: Mapping[str, object], own: Mapping[str, object]) -> None:
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    if missing or unexpected:
        parts = [f"missing {what}: {quoted(missing)}"] if missing else []
        parts += [f"unexpected {what}: {quoted(unexpected)}"] if unexpected else []
        raise ValueError("it is of another model: " + "; ".join(parts))
