"""A user's own data from an .npz file with the arrays x_train, y_train, x_test and y_test."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.labels import Array, read_labels
from rlsprune.app.data.streams import MAX_BYTES, Readable, Source, open_regular
from rlsprune.model.arguments import quoted

__all__ = ["read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
_WRITE = "Write it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"
_CHANNELS = (1, 3, 4)
_MAX_EXPANSION = 64  # times the size of the file, or MAX_BYTES if that is more: real data do not pack better
_MAX_ITEM = 4096  # bytes
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)  # code points of Unicode
# Errors of zipfile and NumPy for damaged archives and headers; RuntimeError is for encrypted members.
_ZIP_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    SyntaxError,
    RuntimeError,
    OverflowError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_npz(path: str | os.PathLike[str], task: str | None = None) -> Dataset:
    """Reads a data set from an .npz file. Nothing in the file is executed: arrays of objects are refused.

    ``x_…`` are features (N, F), images (N, C, H, W) or grey images (N, H, W) of bytes. Bytes are divided by 255 when
    batches are made, other numbers are taken as they are. ``y_…`` are whole numbers from 0, or names of classes;
    numbers to predict (N,) or (N, K); or zeros and ones (N, K) that mark which of K labels each entry has.

    Args:
        path: The file.
        task: The task of ``y_…``; None to guess.

    Raises:
        DataError: The file is missing, damaged, or holds something else.
    """
    path = Path(path)
    arrays = _read(path)
    train, test = (_inputs(path, f"x_{part}", arrays[f"x_{part}"]) for part in ("train", "test"))
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise DataError(
            path,
            f"x_train is {train.dtype} of {train.shape} and x_test {test.dtype} of {test.shape}",
            "Both must have the same type, and the same shape except for the first number",
        )
    for part, inputs in (("train", train), ("test", test)):
        count = len(arrays[f"y_{part}"]) if arrays[f"y_{part}"].ndim else 0
        if len(inputs) != count or not count:
            raise DataError(path, f"x_{part} has {len(inputs)} entries and y_{part} {count}", "Give one y per x")
    labels = read_labels(path, arrays["y_train"], arrays["y_test"], task)
    inside, outside = (torch.from_numpy(np.ascontiguousarray(inputs)) for inputs in (train, test))
    splits = Split(inside, labels.train), Split(outside, labels.test)
    return Dataset(path.stem, labels.names, splits[0], splits[1], task=labels.task)


def _read(path: Path) -> dict[str, Array]:
    try:
        with open_regular(path, _WRITE) as (packed, size), zipfile.ZipFile(packed) as archive:
            members = {member.filename: member for member in archive.infolist()}
            missing = [key for key in KEYS if f"{key}.npy" not in members]
            if missing:
                found = quoted(name.removesuffix(".npy") for name in members) or "nothing"
                raise DataError(path, f"it has no {', '.join(missing)}; it has {found}", _WRITE)
            _check_sizes(path, [members[f"{key}.npy"] for key in KEYS], size)
            return {key: _array(path, archive, members[f"{key}.npy"]) for key in KEYS}
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(path, "there is not enough memory to read it", "Free some memory and try again") from error
    except _ZIP_ERRORS as error:
        raise DataError(path, f"it cannot be read ({error})", _WRITE) from error


def _check_sizes(path: Path, members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Checks all sizes before anything is unpacked."""
    total = sum(member.file_size for member in members)
    most = max(MAX_BYTES, _MAX_EXPANSION * size)
    if total > most:
        raise DataError(path, f"its arrays would unpack to {total:,} bytes, but at most {most:,} are read", _WRITE)


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Reads one array, after its header was checked against the member's size before any allocation."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise DataError(path, f"{member.filename} is of the unknown version {version}", _WRITE)
        shape, in_columns, dtype = readers[version](file)
        size = math.prod(shape) * dtype.itemsize
        # With a type of size zero any shape would fit; names of classes are the longest entries to expect.
        if dtype.hasobject or dtype.kind not in "uifbU" or not 0 < dtype.itemsize <= _MAX_ITEM:
            raise DataError(path, f"{member.filename} holds {dtype}", "Give numbers, or names of classes")
        if min(shape, default=1) < 0 or size != member.file_size - file.tell():
            raise DataError(path, f"{member.filename} does not have the size of its shape {shape}", _WRITE)
        data = Source(path, cast(Readable, file), size, _WRITE).read(size, member.filename, limit=size)
        if file.read(1):
            raise DataError(path, f"{member.filename} has bytes after its end", _WRITE)
    if dtype.kind == "U":
        codes = data.view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if ((codes > _LAST_CHARACTER) | ((codes >= _SURROGATES[0]) & (codes <= _SURROGATES[1]))).any():
            raise DataError(path, f"{member.filename} holds names that are not text", _WRITE)
    array: Array = data.view(dtype).reshape(shape[::-1] if in_columns else shape)
    return np.ascontiguousarray(array.T) if in_columns else array


def _inputs(path: Path, key: str, array: Array) -> Array:
    if array.dtype.kind not in "uifb" or array.ndim < 2:
        raise DataError(
            path,
            f"{key} is {array.dtype} of shape {array.shape}",
            "Give numbers of shape (N, features) or (N, channels, height, width)",
        )
    if array.ndim == 4 and array.shape[3] in _CHANNELS and array.shape[1] not in _CHANNELS:
        raise DataError(
            path, f"{key} has shape {array.shape}, channels last", f"Store {key}.transpose(0, 3, 1, 2) instead"
        )
    if array.dtype == np.uint8:
        return array[:, None] if array.ndim == 3 else array
    with np.errstate(over="ignore"):  # values that do not fit become infinite
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(path, f"{key} holds a NaN or an infinity", "Replace or leave out such entries")
    return values
