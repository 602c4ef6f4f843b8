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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset
from rlsprune.app.run.recipe import Layout
from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError
from rlsprune.model.arguments import quoted

__all__ = ["find_builder", "find_layout", "load_weights"]

Builder = Callable[[], nn.Module]


def find_builder(spec: str, import_from: str) -> Builder:
    """The function that builds the network.

    Args:
        spec: `module:function`, or `path/to/file.py:function`; the function takes no arguments.
        import_from: The folder in which modules are looked for first.

    Raises:
        ValueError: There is no such module or function. What the module itself raises comes as it is.
    """
    name, colon, attribute = spec.rpartition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"{spec!r} does not name a model: give module:function, for example my_module:build_model")
    module = _load_file(Path(name)) if name.endswith(".py") else _import(name, import_from)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name} has no {attribute!r}: {_candidates(module)}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{spec} is a {kind}, not a function that builds a network: {_candidates(module)}")

    def build() -> nn.Module:
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ValueError(f"{spec} cannot be called without arguments ({error}): give them defaults") from error
        model = found()
        if not isinstance(model, nn.Module):
            raise ValueError(f"{spec} returned a {type(model).__name__}: it must return a torch.nn.Module")
        return model

    return build


def _import(name: str, import_from: str) -> ModuleType:
    if import_from not in sys.path:
        sys.path.insert(0, import_from)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # one that the user's module imports
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
        sys.path.insert(0, str(path.parent))  # what lies beside it can be imported
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
    """How the network takes the data: in their own shape, or flat.

    Raises:
        ValueError: It takes neither, or does not put out a value per class.
    """
    inputs = torch.zeros(2, *data.shape, device=data.train.images.device)
    was_training = model.training
    model.eval()
    try:
        outputs, layout = _outputs(model, inputs, data, name)
    finally:
        model.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 2:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{name} gives {shape} for 2 examples: it must give a tensor of shape (2, classes)")
    if outputs.shape[1] != len(data.classes):
        raise ValueError(
            f"{name} puts out {outputs.shape[1]} values, but {data.name} has {len(data.classes)} classes "
            f"({quoted(data.classes)}): make its last layer {len(data.classes)} wide"
        )
    return layout


def _outputs(model: nn.Module, inputs: Tensor, data: Dataset, name: str) -> tuple[Any, Layout]:
    try:
        return model(inputs), "plain"
    except Exception as error:  # whatever a network raises on inputs that are not for it
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

    A file of `rlsprune.save` may be of a pruned network: the model takes its shape.

    Raises:
        FileError: It is missing, damaged, or not of this model.
    """
    if not path.is_file():
        raise FileError(path, "there is no such file", "give a .safetensors or .pt file with the model's weights")
    if path.suffix != ".safetensors":
        tensors = _read_pickle(path, model.state_dict())
    elif _is_ours(path):
        modelfile.load(path, into=model)
        return
    else:
        tensors = load_file(path)
    _check_fit(path, tensors, model.state_dict())
    model.load_state_dict(tensors)


def _check_fit(path: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unexpected:
        parts = [f"lacks {quoted(missing)}"] if missing else []
        parts += [f"has {quoted(unexpected)}, which the model has not"] if unexpected else []
        raise FileError(path, " and ".join(parts), "give the weights of this very model")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise FileError(
                path,
                f"{name!r} is {tuple(tensor.shape)} in it and {tuple(own[name].shape)} in the model",
                "give the weights of this very model; to take only some of them, do it in the function that builds it",
            )


def _is_ours(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return "rlsprune" in (file.metadata() or {})
    except SafetensorError as error:
        raise FileError(path, f"is not a sound safetensors file ({error})", "get the file again") from error


def _read_pickle(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a .pt file, which are looked at without their data first: a few bytes can claim terabytes."""
    remedy = "save it with torch.save(model.state_dict(), path), or as safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            packed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
            total = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # zipfile raises nearly every type there is, and so does torch
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
            raise FileError(path, "it holds something else than tensors by name", remedy)
        if not all(isinstance(name, str) for name in content):
            raise FileError(path, "it holds tensors under names that are not text", remedy)
        _check_fit(path, content, own)
    return dict(content)


def _unreadable(path: Path, error: Exception, remedy: str) -> FileError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return FileError(path, f"it cannot be read without executing it, or is damaged ({reason})", remedy)
