"""Safetensors files with a JSON text and a checksum in their header, for models and the state of a run.

Nothing in such a file can execute code. Its content is checked before memory is allocated for it: a bounded header,
tensors of known types that lie side by side in the file, names and shapes that the caller compares with its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsprune.io.atomic import FileError, check_name, replacing
from rlsprune.model.interrupts import uninterrupted

__all__ = ["DTYPES", "Entry", "TensorFile", "opened", "parse_json", "reading", "write"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type that a file may hold → its name in the file."""

MAX_HEADER = 64 * 2**20  # bytes; the parsed header takes a multiple of that
MAX_TENSORS = 100_000  # each takes the reader tens of microseconds and a kilobyte
_OBJECT = re.compile(rb'\{\s*"')
_CHECKSUM = "sha256"


class Entry(Protocol):
    """A tensor in a file, before it is read."""

    def get_shape(self) -> list[int]:
        """Returns the shape."""

    def get_dtype(self) -> str:
        """Returns the name of the type."""


class TensorFile:
    """An open file, of which only the header has been read."""

    def __init__(self, file: Any, key: str) -> None:
        header = file.metadata() or {}
        if key not in header or _CHECKSUM not in header:
            raise ValueError(f"it has no {key} metadata: another program wrote it")
        if header.get("format", "pt") != "pt" or header.keys() - {"format", key, _CHECKSUM}:
            raise ValueError("its header differs from what was written: it was damaged or changed")
        self._file = file
        self.checksum: str = header[_CHECKSUM]
        """The checksum of the text and all tensors; `tensors` verifies it."""
        self.text: str = header[key]
        """The JSON text."""
        self.entries: dict[str, Entry] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        """Type and shape of every tensor."""
        for name, entry in self.entries.items():
            if entry.get_dtype() not in DTYPES.values():
                raise ValueError(f"{name[:80]!a} is of the unusual type {entry.get_dtype()}")

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor, without verifying the checksum."""
        with uninterrupted():  # safetensors takes Ctrl-C for damage
            tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        """Reads all tensors, and verifies the checksum."""
        tensors = {name: self.tensor(name).clone() for name in self.entries}  # clone: off the mapped file
        if digest(self.text, tensors) != self.checksum:
            raise ValueError("its data does not match its checksum: it was damaged or changed")
        return tensors


def write(path: str | os.PathLike[str], key: str, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file whole or not at all; equal content gives equal bytes.

    Args:
        path: The file.
        key: Key of the text in the header.
        text: JSON.
        tensors: Dense tensors, on any device; views of one storage are written one by one.

    Raises:
        ValueError: The text is too long to be read again.
        OSError: The file cannot be written.
    """
    if len(text) > MAX_HEADER // 2:
        raise ValueError(
            f"metadata takes {len(text):,} characters, {MAX_HEADER // 2:,} at most: keep it in a file of its own"
        )
    stored = _separate(tensors)
    header = {"format": "pt", key: text, _CHECKSUM: digest(text, stored)}
    with uninterrupted(), replacing(path) as temporary:
        try:
            save_file(stored, temporary, header)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # a write names no file


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes the safetensors format: the header's length, the header as JSON, the tensors one after the other.

    The writer of safetensors itself shuffles the metadata, so that no two of its files are equal.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # The widest types first, as in safetensors: then every tensor begins at a multiple of its type's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes(tensors[name]))


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], key: str, remedy: str) -> Iterator[TensorFile]:
    """Opens a file of `write`. Problems found inside the block become a `FileError`.

    Args:
        path: The file.
        key: Key of the text in the header.
        remedy: The remedy for the message.
    """
    with opened(path, remedy) as file:
        yield TensorFile(file, key)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], remedy: str) -> Iterator[Any]:
    """Opens any safetensors file whose header is of a sensible size, with ``safetensors.safe_open``.

    Problems found inside the block become a `FileError`.

    Args:
        path: The file.
        remedy: The remedy for the message.
    """
    check_name(path)
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise FileError(path, "is not a regular file", remedy)
    with Path(path).open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
    if status.st_size < 8 or length > status.st_size - 8:
        raise FileError(path, f"is not a whole safetensors file ({status.st_size:,} bytes)", remedy)
    if length > MAX_HEADER:
        raise FileError(path, f"has a header of {length:,} bytes, {MAX_HEADER:,} are allowed", remedy)
    with Path(path).open("rb") as raw:
        header = raw.read(8 + length)
    if next(itertools.islice(_OBJECT.finditer(header), MAX_TENSORS, None), None) is not None:
        raise FileError(path, f"has a header that lists more than {MAX_TENSORS:,} tensors", remedy)
    try:
        with uninterrupted():
            mapped = safe_open(path, framework="pt", device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise FileError(path, f"cannot be mapped into memory ({str(error).partition('<')[0]})", remedy) from error
    except SafetensorError as error:
        raise FileError(path, f"is not a sound safetensors file ({str(error)[:200]})", remedy) from error
    try:
        with mapped as file:
            yield file
    except SafetensorError as error:
        raise FileError(path, f"is not a sound safetensors file ({str(error)[:200]})", remedy) from error
    except ValueError as error:
        raise FileError(path, str(error), remedy) from error


def parse_json(text: str) -> Any:
    """Parses untrusted JSON; every problem is a `ValueError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its metadata is not JSON ({str(error)[:100]})") from None


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over the text and over name, type, shape and bytes of every tensor."""
    sha = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors on the CPU, each in a storage of its own: safetensors refuses shared ones."""
    separate = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    return separate
