"""A user's own network: found by name, built, checked against the data, and filled with weights."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset
from rlsprune.app.run.recipe import Layout
from rlsprune.io import modelfile, tensorfile
from rlsprune.io.atomic import FileError
from rlsprune.model.arguments import quoted
from rlsprune.model.interrupts import uninterrupted

__all__ = ["find_builder", "find_function", "find_layout", "load_weights"]

Builder = Callable[[], nn.Module]
_SAID = {"classification": "classes", "regression": "targets", "multi-label": "labels"}


def find_builder(spec: str, import_from: str) -> Builder:
    """Finds the function that builds the network.

    Args:
        spec: `module:function`, or `path/to/file.py:function`; the function takes no arguments.
        import_from: The folder in which modules are looked for first.

    Raises:
        ValueError: There is no such module or function. Errors of the module itself are passed on unchanged.
    """
    function = find_function(spec, import_from)

    def build() -> nn.Module:
        model = function()
        if not isinstance(model, nn.Module):
            raise ValueError(f"{spec} returned a {type(model).__name__}: it must return a torch.nn.Module")
        return model

    return build


def find_function(spec: str, import_from: str) -> Callable[[], Any]:
    """Finds a function of the user's that takes no arguments; see `find_builder`."""
    name, colon, attribute = spec.rpartition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"{spec!r} does not name a function: give module:function, for example my_module:build_model")
    module = _load_file(Path(name)) if name.endswith(".py") else _import(name, import_from)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name} has no {attribute!r}: {_candidates(module)}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{spec} is a {kind}, not a function: {_candidates(module)}")

    def call() -> Any:
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ValueError(f"{spec} cannot be called without arguments ({error}): give them defaults") from error
        return found()

    return call


def _import(name: str, import_from: str) -> ModuleType:
    if import_from not in sys.path:
        sys.path.insert(0, import_from)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports is missing
        raise ValueError(
            f"there is no module {name!r} in {import_from} or among the installed ones: run the command in its folder, "
            f"or give the file, as in path/to/{name.replace('.', '/')}.py:build_model"
        ) from error


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no file {path}: give module:function or path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would: classes can then be found by their module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # files beside it can be imported
    spec.loader.exec_module(module)
    return module


def _candidates(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return f"it has {', '.join(names)}" if names else "it defines no function"


@torch.no_grad()
def find_layout(model: nn.Module, data: Dataset, name: str) -> Layout:
    """Finds how the network takes the data: in their own shape, or flat.

    Raises:
        ValueError: The network takes neither, or does not return a value per class.
    """
    inputs = torch.zeros(2, *data.shape, device=data.train.images.device)
    was_training = model.training
    model.eval()
    try:
        outputs, layout = _outputs(model, inputs, data, name)
    finally:
        model.train(was_training)
    wanted, what = len(data.classes), _SAID[data.task]
    if isinstance(outputs, Tensor) and outputs.shape == (2,) and data.task == "regression" and wanted == 1:
        return layout
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 2:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{name} returns {shape} for 2 examples: it must return a tensor of shape (2, {what})")
    if outputs.shape[1] != wanted:
        raise ValueError(
            f"{name} returns {outputs.shape[1]} values, but {data.name} has {wanted} {what} "
            f"({quoted(data.classes)}): make its last layer {wanted} wide, or choose another --task"
        )
    return layout


def _outputs(model: nn.Module, inputs: Tensor, data: Dataset, name: str) -> tuple[Any, Layout]:
    try:
        return model(inputs), "plain"
    except Exception as error:  # a network may raise any error for inputs of another shape
        if inputs.ndim > 2:
            try:
                return model(inputs.flatten(1)), "flat"
            except Exception:
                pass
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name} does not take the data of {data.name}, {'×'.join(map(str, data.shape))} each ({reason}): change "
            "the network, or the data (--image-size, --channels)"
        ) from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills the network from a .safetensors file or from a .pt file of tensors; nothing in it is executed.

    A file of `rlsprune.save` may hold a pruned network; the model then takes its shape.

    Raises:
        FileError: The file is missing, damaged, or not of this model.
    """
    if not path.is_file():
        raise FileError(path, "there is no such file", "give a .safetensors or .pt file with the model's weights")
    own = model.state_dict()
    tensors = _read_safetensors(path, own) if path.suffix == ".safetensors" else _read_pickle(path, own)
    if tensors is None:
        modelfile.load(path, into=model)
    else:
        model.load_state_dict(tensors)


class _Outline(NamedTuple):
    """The description of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """The data type; None for a type that weights never have."""
    dense: bool = True


def _check_fit(path: Path, tensors: Mapping[str, _Outline], own: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unexpected:
        parts = [f"lacks {quoted(missing)}"] if missing else []
        parts += [f"has {quoted(unexpected)}, which the model lacks"] if unexpected else []
        raise FileError(path, " and ".join(parts), "give the weights of this very model")
    for name, tensor in tensors.items():
        if tensor.shape != tuple(own[name].shape):
            raise FileError(
                path,
                f"{name!r} is {tensor.shape} in it and {tuple(own[name].shape)} in the model",
                "give the weights of this very model; to take only some of them, do it in the function that builds it",
            )
        wanted, dtype = own[name].dtype, tensor.dtype
        if not tensor.dense or dtype is None or (dtype != wanted and _kind(dtype) != _kind(wanted)):
            found = "sparse" if not tensor.dense else str(dtype or "of an unusual type").removeprefix("torch.")
            raise FileError(path, f"{name!r} is {found} in it and {wanted} in the model", "give dense tensors like it")


def _kind(dtype: torch.dtype) -> str:
    """Returns the group of types within which values are cast: floating-point types, or whole numbers."""
    return "floating" if dtype.is_floating_point else str(dtype) if dtype == torch.bool or dtype.is_complex else "whole"


def _read_safetensors(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Reads the tensors of a file that another program wrote, after a check of their shapes; None for our own files."""
    dtypes = {name: dtype for dtype, name in tensorfile.DTYPES.items()}
    with tensorfile.opened(path, "get the file again") as file:
        if "rlsprune" in (file.metadata() or {}):
            return None
        entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        _check_fit(
            path,
            {name: _Outline(tuple(e.get_shape()), dtypes.get(e.get_dtype())) for name, e in entries.items()},
            own,
        )
        with uninterrupted():  # safetensors mistakes Ctrl-C for damage
            return {name: file.get_tensor(name).clone() for name in entries}


def _read_pickle(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads the tensors of a .pt file, after a look at their shapes without data: a few bytes can claim terabytes."""
    remedy = "save it with torch.save(model.state_dict(), path), or as safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            packed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
            total = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # zipfile and torch raise nearly every type of error
        raise _unreadable(path, error, remedy) from error
    if packed or total > path.stat().st_size:
        raise FileError(path, "it is not as torch.save writes it: its parts are packed or overlap", remedy)
    for device in ("meta", "cpu"):
        try:
            content: Any = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:
            raise _unreadable(path, error, remedy) from error
        if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
            content = content["state_dict"]
        if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
            raise FileError(path, "it holds something other than tensors by name", remedy)
        if not all(isinstance(name, str) for name in content):
            raise FileError(path, "it holds tensors under names that are not text", remedy)
        outlines = {
            name: _Outline(tuple(tensor.shape), tensor.dtype, tensor.layout == torch.strided)
            for name, tensor in content.items()
        }
        _check_fit(path, outlines, own)
    return dict(content)


def _unreadable(path: Path, error: Exception, remedy: str) -> FileError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return FileError(path, f"it cannot be read without executing it, or is damaged ({reason})", remedy)
