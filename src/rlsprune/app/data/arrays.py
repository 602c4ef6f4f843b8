"""A user's own data from an .npz file with the arrays x_train, y_train, x_test and y_test."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.streams import MAX_BYTES, Readable, Source, open_regular
from rlsprune.model.arguments import quoted

__all__ = ["read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
_WRITE = "Write it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"
_CHANNELS = (1, 3, 4)
_MAX_EXPANSION = 64  # times the size of the file, or MAX_BYTES: real data do not pack better
_MAX_ITEM = 4096  # bytes
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)  # of Unicode
# As damaged archives and headers make zipfile and NumPy raise; RuntimeError is for encrypted members.
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

Array = npt.NDArray[Any]


def read_npz(path: str | os.PathLike[str]) -> Dataset:
    """Reads a data set from an .npz file. Nothing in the file is executed: arrays of objects are refused.

    ``x_…`` are features (N, F), images (N, C, H, W) or grey images (N, H, W) of bytes; bytes are divided by 255 when
    batches are made, other numbers are taken as they are. ``y_…`` are whole numbers from 0, or names of classes.

    Raises:
        DataError: It is missing, damaged, or holds something else.
    """
    path = Path(path)
    arrays = _read(path)
    (train, train_labels), (test, test_labels) = (
        (_inputs(path, f"x_{part}", arrays[f"x_{part}"]), _labels(path, f"y_{part}", arrays[f"y_{part}"]))
        for part in ("train", "test")
    )
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise DataError(
            path,
            f"x_train is {train.dtype} of {train.shape} and x_test {test.dtype} of {test.shape}",
            "Both must be of one type, and of one shape but for the first number",
        )
    for part, inputs, labels in (("train", train, train_labels), ("test", test, test_labels)):
        if len(inputs) != len(labels) or not len(labels):
            raise DataError(path, f"x_{part} has {len(inputs)} entries and y_{part} {len(labels)}", "Give one y per x")
    classes, train_labels, test_labels = _classes(path, train_labels, test_labels)
    return Dataset(path.stem, classes, _split(train, train_labels), _split(test, test_labels))


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
    """Before anything is unpacked."""
    total = sum(member.file_size for member in members)
    most = max(MAX_BYTES, _MAX_EXPANSION * size)
    if total > most:
        raise DataError(path, f"its arrays would unpack to {total:,} bytes, at most {most:,} are read", _WRITE)


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array. Its header's claims are compared with the member's size before memory is taken."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise DataError(path, f"{member.filename} is of the unknown version {version}", _WRITE)
        shape, in_columns, dtype = readers[version](file)
        size = math.prod(shape) * dtype.itemsize
        # A type of no size would make any shape fit; names of classes are the longest entries that there should be.
        if dtype.hasobject or dtype.kind not in "uifbU" or not 0 < dtype.itemsize <= _MAX_ITEM:
            raise DataError(path, f"{member.filename} holds {dtype}", "Give numbers, or names of classes")
        if min(shape, default=1) < 0 or size != member.file_size - file.tell():
            raise DataError(path, f"{member.filename} has not the size of its shape {shape}", _WRITE)
        data = Source(path, cast(Readable, file), size, _WRITE).read(size, member.filename, limit=size)
        if file.read(1):
            raise DataError(path, f"{member.filename} goes on after its end", _WRITE)
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
    with np.errstate(over="ignore"):  # what does not fit becomes infinite
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(path, f"{key} holds a NaN or an infinity", "Replace or leave out such entries")
    return values


def _labels(path: Path, key: str, array: Array) -> Array:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "uiU":
        hint = f"numpy.argmax({key}, axis=1) if it is one-hot" if array.ndim == 2 else "whole numbers from 0, or names"
        raise DataError(path, f"{key} is {array.dtype} of shape {array.shape}", f"Labels must be of shape (N,): {hint}")
    if array.dtype.kind != "U" and len(array) and int(array.min()) < 0:
        raise DataError(path, f"{key} holds {int(array.min())}", "Classes are numbered from 0")
    return array


def _classes(path: Path, train: Array, test: Array) -> tuple[tuple[str, ...], Array, Array]:
    """The names of the classes, and the labels as numbers of them."""
    if (train.dtype.kind == "U") != (test.dtype.kind == "U"):
        raise DataError(path, "one of y_train and y_test holds names and the other numbers", "Use either in both")
    if train.dtype.kind == "U":
        names, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
        return tuple(map(str, names)), numbers[: len(train)], numbers[len(train) :]
    count = int(max(train.max(), test.max())) + 1
    if count > len(train):
        raise DataError(
            path,
            f"its highest label is {count - 1}, but there are only {len(train)} training entries",
            "Number the classes 0, 1, 2, …",
        )
    return tuple(map(str, range(count))), train, test


def _split(inputs: Array, labels: Array) -> Split:
    return Split(torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(labels.astype(np.int64)))
