"""The state of a run in one file: nested plain containers with tensors in them. No file can execute anything.

A safetensors file holds the tensors under the numbers 0, 1, …. Its JSON text holds the containers: lists are lists, and
everything that JSON lacks is an object with one key: `{"dict": [[key, value], …]}`, `{"tuple": […]}` and
`{"tensor": [number, memory format]}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsprune.io import tensorfile
from rlsprune.model.tensors import memory_format

__all__ = ["load_state", "save_state"]

_KEY = "rlsprune-state"
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_FORMAT_NAMES = {value: name for name, value in _FORMATS.items()}
_DIMS = {"channels_last": 4, "channels_last_3d": 5}
_REMEDY = "go on from an earlier checkpoint, or start the run again"


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Writes a state, whole or not at all, with a checksum.

    Args:
        path: The file.
        state: Dicts, lists, tuples, strings, numbers, booleans, None and dense tensors, nested in any way.

    Raises:
        ValueError: The state holds something else; the message says what and where.
        OSError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(dict(state), tensors, "state"))
    tensorfile.write(path, _KEY, text, tensors)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a file of `save_state`; tensors are on the CPU.

    Raises:
        FileError: The file is damaged, or not a state.
        OSError: The file cannot be read.
    """
    with tensorfile.reading(path, _KEY, _REMEDY) as file:
        packed = tensorfile.parse_json(file.text)
        tensors = file.tensors()
        try:
            state = _unpacked(packed, tensors)
        except RecursionError:
            raise ValueError("its containers are nested too deeply") from None
        if not isinstance(state, dict) or tensors:
            raise ValueError("it does not hold the state of a run")
        return state


def _packed(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Returns the value in JSON's types, and adds its tensors to `tensors`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_packed(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):  # such as torch.Size
        return {"tuple": [_packed(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_packed(key, tensors, f"a key of {where}"), _packed(item, tensors, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in tensorfile.DTYPES:
        number = str(len(tensors))
        tensors[number] = value
        return {"tensor": [number, _FORMAT_NAMES[memory_format(value)]]}
    raise ValueError(f"{where} is {type(value).__name__}, which is not kept: use plain containers, numbers and tensors")


def _unpacked(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value that was packed, and takes each of its tensors out of `tensors` once."""
    if isinstance(packed, list):
        return [_unpacked(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1:
        raise ValueError("it holds an object that is none of dict, tuple and tensor")
    [(kind, content)] = packed.items()
    if not isinstance(content, list):
        raise ValueError("it holds an object without a list")
    if kind == "tuple":
        return tuple(_unpacked(item, tensors) for item in content)
    if kind == "dict":
        return _dict(content, tensors)
    if kind == "tensor":
        return _tensor(content, tensors)
    raise ValueError(f"it holds an object of the unknown kind {kind[:40]!a}")


def _dict(content: list[Any], tensors: dict[str, Tensor]) -> dict[Any, Any]:
    result = {}
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("it holds a dict with an entry that is not a key and a value")
        key = _unpacked(pair[0], tensors)
        try:
            known = key in result
        except TypeError:
            known = True  # not hashable
        if known:
            raise ValueError("it holds a dict with a key that is repeated or not hashable")
        result[key] = _unpacked(pair[1], tensors)
    return result


def _tensor(content: list[Any], tensors: dict[str, Tensor]) -> Tensor:
    known = len(content) == 2 and all(isinstance(part, str) for part in content)
    if not known or content[0] not in tensors or content[1] not in _FORMATS:
        raise ValueError("it refers to a tensor that is missing, used twice, or in an unknown memory format")
    tensor = tensors.pop(content[0])
    if _DIMS.get(content[1], tensor.dim()) != tensor.dim():
        raise ValueError(f"it holds a tensor of {tensor.dim()} dimensions in the format {content[1]}")
    return tensor.contiguous(memory_format=_FORMATS[content[1]])
