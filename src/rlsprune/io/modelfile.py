"""Models in files: `save` writes one safetensors file, `load` makes a fresh model fit it. No file can execute anything.

A file holds every parameter and buffer once, and in its header's metadata
- `rlsprune`: JSON with the format's version, the sizes of the layers, the widths before the input selectors, names that
  share a tensor, and the caller's metadata, such as the pruning history;
- `sha256`: the digest of that JSON and of all tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.distributed.ranks import find_ranks
from rlsprune.io import compatibility, tensorfile
from rlsprune.io.atomic import FileError
from rlsprune.io.tensorfile import DTYPES, TensorFile
from rlsprune.model.arguments import quoted, shown
from rlsprune.model.calls import bare_copy, unwrap
from rlsprune.model.interrupts import uninterrupted
from rlsprune.model.modes import refuse_inference_mode
from rlsprune.model.selector import check_kept, full_in_features, kept_inputs, set_kept_inputs
from rlsprune.model.sharded import settle, sharded_modules
from rlsprune.model.sizes import read_sizes, write_sizes
from rlsprune.model.tensors import memory_format, replace_data

__all__ = ["load", "read_checksum", "read_metadata", "reshape", "save", "shape_of", "undone_on_error", "verify"]

FORMAT = 1
_KEY = "rlsprune"
_REMEDY = "give an undamaged file that rlsprune.save wrote for this model"


def save(model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
    """Writes a model, pruned or not, to one safetensors file.

    It writes a temporary file in the same folder, flushes it to the disk and renames it: on errors the old file stays.

    Args:
        model: The model, also in wrappers of `torch.compile` and data parallelism. If ``fully_shard`` divides it,
            all ranks call this, and rank 0 writes.
        path: The file, which usually ends in `.safetensors`.
        metadata: Metadata that `json.dumps` takes; `read_metadata` returns it.

    Raises:
        ValueError: If the file cannot hold the model: it has state outside tensors, tensors without data or of an
            unusual type, or metadata that is not JSON.
        OSError: If the file cannot be written.

    Examples:
        >>> import torch
        >>> save(torch.nn.Linear(4, 2), "small.safetensors", {"note": "unpruned"})
    """
    model = unwrap(model)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is {shown(metadata)}: give a dict, or None")
    ranks = find_ranks(model) if sharded_modules(model) else None
    if ranks is not None:
        model = bare_copy(model)
    tensors, aliases = _distinct(compatibility.named_tensors(model))
    layers = compatibility.sized_layers(model)
    content = {
        "format": FORMAT,
        "layers": {name: read_sizes(layer) for name, layer in layers.items()},
        "inputs": {
            name: full_in_features(layer)
            for name, layer in layers.items()
            if isinstance(layer, nn.Linear) and kept_inputs(layer) is not None
        },
        "aliases": aliases,
        "metadata": {} if metadata is None else dict(metadata),
    }
    try:
        text = json.dumps(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata is not JSON ({error}): use plain numbers, strings, lists and dicts") from error
    if ranks is None or ranks.rank == 0:
        tensorfile.write(path, _KEY, text, tensors)
    if ranks is not None:
        ranks.gather(None)  # no rank reads the file before it exists


def load(path: str | os.PathLike[str], into: nn.Module) -> nn.Module:
    """Gives a fresh model the shape and the weights of a file that `save` wrote.

    The layers are resized in place, so the `Parameter` objects, their devices and flags stay. Everything in the file is
    first checked against the model: the model takes all of it, or does not change.

    Args:
        path: The file.
        into: A model made the way the saved one was made, before pruning, on any device.

    Returns:
        The same model.

    Raises:
        FileError: If the file is damaged, or from another program or model.
        ValueError: If the model cannot take a file.
        OSError: If the file cannot be read.
        RuntimeError: Inside ``torch.inference_mode()``.

    Examples:
        >>> import torch
        >>> save(torch.nn.Linear(4, 2), "small.safetensors")
        >>> model = load("small.safetensors", into=torch.nn.Linear(4, 3))
        >>> model.out_features
        2
    """
    refuse_inference_mode("loading")
    model = unwrap(into)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'!r} is scripted, and its layers cannot change: load before scripting it"
            )
    layers = compatibility.sized_layers(model)
    own = _own(model)
    for name, tensor in own.items():
        if not compatibility.has_data(tensor):
            raise ValueError(f"{name!r} of the model has no data to replace: make the model on a real device first")
    with tensorfile.reading(path, _KEY, _REMEDY) as file:
        content = _content(file)
        sizes = compatibility.check_sized_layers(content["layers"], layers)
        widths = compatibility.check_inputs(content["inputs"], layers)
        entries = file.entries
        selectors = {compatibility.selector_name(name): name for name in widths}
        sources = compatibility.check_names(
            [name for name in entries if name not in selectors], content["aliases"], own
        )
        compatibility.check_tensors({name: entries[source] for name, source in sources.items()}, own, model, sizes)
        for name, layer_name in selectors.items():
            compatibility.check_selector(layer_name, entries.get(name), sizes[layer_name]["in_features"])
        tensors = file.tensors()
        kept = {layer: check_kept(tensors[name], widths[layer]) for name, layer in selectors.items()}
    fresh = _on_devices(own, sources, tensors)
    with uninterrupted(), undone_on_error(model):
        _apply(model, fresh, sizes, {name: (kept[name], widths[name]) for name in kept})
    return into


def shape_of(model: nn.Module) -> dict[str, Any]:
    """Returns all of a network but its parameters: the sizes of its layers, its input selectors and its buffers."""
    layers = compatibility.sized_layers(model)
    selectors = {name: (kept_inputs(layer), full_in_features(layer)) for name, layer in _linear(layers).items()}
    return {
        "layers": {name: read_sizes(layer) for name, layer in layers.items()},
        "selectors": {name: pair for name, pair in selectors.items() if pair[0] is not None},
        "buffers": {name: tensor for name, tensor in _own(model).items() if not isinstance(tensor, nn.Parameter)},
    }


def reshape(
    model: nn.Module, shape: Mapping[str, Any], weights: Mapping[str, Tensor | None], path: str | os.PathLike[str]
) -> None:
    """Gives a network the shape that `shape_of` returned for another one, and its parameters; all or nothing.

    Raises:
        FileError: The shape or the parameters are of another network; the message names ``path``, their source.
    """
    own, layers = _own(model), compatibility.sized_layers(model)
    fresh = {**weights, **shape["buffers"]}
    odd = [name for name in {**own, **fresh} if name not in own or fresh.get(name) is None]
    if odd or layers.keys() != shape["layers"].keys():
        raise FileError(path, f"it is of another model: {quoted(odd) or 'its layers differ'}", "build the same model")
    with uninterrupted(), undone_on_error(model):
        _apply(model, fresh, shape["layers"], shape["selectors"])


def _apply(
    model: nn.Module,
    tensors: Mapping[str, Any],
    sizes: Mapping[str, Any],
    selectors: Mapping[str, tuple[Tensor, int]],
) -> None:
    for name, target in _own(model).items():
        replace_data(target, tensors[name])
    settle(model)
    for name, layer in compatibility.sized_layers(model).items():
        write_sizes(layer, sizes[name])
        if isinstance(layer, nn.Linear) and name in selectors:
            set_kept_inputs(layer, *selectors[name])


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name, without the input selectors."""
    layers = _linear(compatibility.sized_layers(model))
    selecting = {compatibility.selector_name(name) for name, layer in layers.items() if kept_inputs(layer) is not None}
    return {name: tensor for name, tensor in compatibility.named_tensors(model).items() if name not in selecting}


def _linear(layers: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Restores tensors, sizes and input selectors if an error, such as missing memory, occurs inside."""
    own, layers = _own(model), compatibility.sized_layers(model)
    tensors = [(tensor, tensor.data, tensor.grad) for tensor in own.values()]
    sizes = [(layer, read_sizes(layer)) for layer in layers.values()]
    selectors = [(layer, kept_inputs(layer), full_in_features(layer)) for layer in _linear(layers).values()]
    try:
        yield
    except BaseException:
        for tensor, data, grad in tensors:
            replace_data(tensor, data)
            tensor.grad = grad
        settle(model)
        for sized, size in sizes:
            assert size is not None
            write_sizes(sized, size)
        for layer, kept, width in selectors:
            set_kept_inputs(layer, kept, width)
        raise


def read_checksum(path: str | os.PathLike[str]) -> str:
    """Returns the checksum in a file of `save`, which identifies it; `load` compares the content with it.

    Raises:
        FileError: If the file is damaged or from another program.
    """
    with tensorfile.reading(path, _KEY, _REMEDY) as file:
        return file.checksum


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a whole file of `save` and compares it with its checksum.

    Returns:
        The same as `read_metadata`.

    Raises:
        FileError: If the file is damaged or from another program.
        OSError: If it cannot be read.
    """
    with tensorfile.reading(path, _KEY, _REMEDY) as file:
        file.tensors()
    return read_metadata(path)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the metadata of a file that `save` wrote. Needs no model and does not read the weights.

    Returns:
        `format` (int), `shapes` (name → tuple), `layers` (name → sizes), `kept_inputs` (layer → list of indices of
        the original features), `aliases` (name → the name whose tensor it shares) and `metadata` (yours).

    Raises:
        FileError: If the file is damaged or from another program.
        OSError: If it cannot be read.

    Examples:
        >>> import torch
        >>> save(torch.nn.Linear(4, 2), "small.safetensors", {"note": "unpruned"})
        >>> about = read_metadata("small.safetensors")
        >>> about["shapes"]["weight"], about["metadata"]
        ((2, 4), {'note': 'unpruned'})
    """
    with tensorfile.reading(path, _KEY, _REMEDY) as file:
        content, entries = _content(file), file.entries
        kept = {}
        for layer, width in content["inputs"].items():
            name = compatibility.selector_name(layer)
            if type(width) is not int:
                raise ValueError(f"the input width of layer {quoted([layer])} is not a whole number")
            compatibility.check_selector(layer, entries.get(name))
            kept[layer] = check_kept(file.tensor(name), width).tolist()
        return {
            "format": content["format"],
            "shapes": {name: tuple(entry.get_shape()) for name, entry in entries.items()},
            "layers": content["layers"],
            "kept_inputs": kept,
            "aliases": content["aliases"],
            "metadata": content["metadata"],
        }


def _content(file: TensorFile) -> dict[str, Any]:
    """Returns the metadata's JSON, after checking the types of its top level."""
    content = tensorfile.parse_json(file.text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("its metadata names no format")
    if content["format"] != FORMAT:
        raise ValueError(f"it has a format other than {FORMAT}, the only one that this version of rlsprune reads")
    for name in ("layers", "inputs", "aliases", "metadata"):
        if not isinstance(content.get(name), dict):
            raise ValueError(f"{name!r} in its metadata is not a mapping")
    return content


def _distinct(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors without duplicates, and for each duplicate the name of the tensor that it repeats."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not compatibility.has_data(tensor):
            raise ValueError(
                f"{name!r} has no data yet: run the model once, or move it to a real device, before saving"
            )
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(
                f"{name!r} is {tensor.dtype}, {tensor.layout}: only dense tensors of common types are saved"
            )
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        key = place if tensor.numel() else id(tensor)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def _on_devices(own: dict[str, Tensor], sources: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the new value of each tensor of the model, on its device and in its memory format.

    Several names of one tensor get the same value.
    """
    fresh: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, target in own.items():
        if first.setdefault(id(target), name) != name:
            fresh[name] = fresh[first[id(target)]]
            continue
        tensor = tensors[sources[name]].to(target.device, copy=sources[name] != name)
        fresh[name] = tensor.contiguous(memory_format=memory_format(target))
    return fresh
