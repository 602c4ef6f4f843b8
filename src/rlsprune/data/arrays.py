"""A user's own data from an .npz file with the arrays x_train, y_train, x_test and y_test."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsprune.data.datasets import Dataset, Split
from rlsprune.data.errors import DataError

__all__ = ["read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
_WRITE = "Write it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"
_CHANNELS = (1, 3, 4)

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
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(path, "it holds a single array", _WRITE)
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                found = ", ".join(file.files[:8]) or "nothing"
                raise DataError(path, f"it has no {', '.join(missing)}; it has {found}", _WRITE)
            return {key: file[key] for key in KEYS}
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", "Give an .npz file or a folder of images") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(path, f"it cannot be read ({error})", _WRITE) from error


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
