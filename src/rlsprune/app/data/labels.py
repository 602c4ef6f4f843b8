"""The targets of prediction: classes, numbers or sets of labels, guessed from the labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlsprune.app.data.errors import DataError

__all__ = ["Array", "ReadLabels", "read_labels"]

Array = npt.NDArray[Any]

_FEW = 20
"""Number of different whole numbers up to which labels always count as classes."""
_EXAMPLES = 2
"""Number of examples per label, on average, from which more whole numbers count as classes too."""


class ReadLabels(NamedTuple):
    """The labels of both splits."""

    task: str
    """One of `rlsprune.app.config.metrics.TASKS`."""
    names: tuple[str, ...]
    """Names of the classes, the labels or the targets."""
    train: Tensor
    """int64 (N,) of classes, else float32 (N, names)."""
    test: Tensor


def read_labels(
    path: Path, train: Array, test: Array, task: str | None = None, names: Sequence[str] = ()
) -> ReadLabels:
    """Converts labels to the tensors that a network learns.

    Args:
        path: The source of the labels, for messages.
        train: Labels of training: names or whole numbers (N,), numbers (N,) or (N, K), or zeros and ones (N, K).
        test: Labels of the test split.
        task: The task; None to guess.
        names: Names of the K columns, if they have names.

    Raises:
        DataError: The labels do not fit the task, or any task.
    """
    train, test = (_in_shape(array) for array in (train, test))
    for key, array in (("y_train", train), ("y_test", test)):
        if array.ndim not in (1, 2) or array.dtype.kind not in "uifbU":
            raise DataError(
                path, f"{key} is {array.dtype} of shape {array.shape}", "Give names, whole numbers from 0, or numbers"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(path, f"{key} holds a NaN or an infinity", "Replace or leave out such entries")
    if (train.dtype.kind == "U") != (test.dtype.kind == "U"):
        raise DataError(path, "one of y_train and y_test holds names and the other numbers", "Use either in both")
    task = task or _guess(train)
    if task == "classification":
        return _classes(path, train, test)
    if train.dtype.kind == "U":
        raise DataError(path, "y_train holds names", f"Give numbers for --task {task}, or take --task classification")
    if train.shape[1:] != test.shape[1:]:
        raise DataError(path, f"y_train has shape {train.shape} and y_test {test.shape}", "Give both as many columns")
    train, test = (array.reshape(len(array), -1) for array in (train, test))
    if task == "multi-label" and not (np.isin(train, (0, 1)).all() and np.isin(test, (0, 1)).all()):
        raise DataError(path, "the labels are not zeros and ones", "Give a column of zeros and ones for each label")
    known = tuple(names) if names else tuple(map(str, range(train.shape[1]))) if train.shape[1] > 1 else ("y",)
    return ReadLabels(task, known, *(torch.from_numpy(array.astype(np.float32)) for array in (train, test)))


def _in_shape(array: Array) -> Array:
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _guess(labels: Array) -> str:
    """Guesses the task from the labels."""
    if labels.dtype.kind in "Ub" and labels.ndim == 1:
        return "classification"
    if labels.ndim == 2:
        # One-hot rows are classes in another form; the message of `_classes` says what to do.
        marks = bool(np.isin(labels, (0, 1)).all())
        return "regression" if not marks else "classification" if (labels.sum(1) == 1).all() else "multi-label"
    values = np.unique(labels)
    if labels.dtype.kind == "f":
        classes = len(values) <= _FEW and np.array_equal(values, np.arange(len(values)))
        return "classification" if classes else "regression"
    few = len(values) <= _FEW or len(values) * _EXAMPLES <= len(labels)
    return "classification" if few else "regression"


def _classes(path: Path, train: Array, test: Array) -> ReadLabels:
    """Converts names or numbers of classes to class indices."""
    for key, array in (("y_train", train), ("y_test", test)):
        whole = array.dtype.kind in "uibU" or not bool((array % 1).any())
        if array.ndim != 1 or not whole:
            hint = (
                f"numpy.argmax({key}, axis=1) if it is one-hot; --task multi-label if each may have several"
                if array.ndim == 2
                else "whole numbers from 0, or names; --task regression if it holds amounts"
            )
            problem = f"{key} is {array.dtype} of shape {array.shape}"
            raise DataError(path, problem, f"Labels must be of shape (N,): {hint}")
        if array.dtype.kind != "U" and len(array) and int(array.min()) < 0:
            raise DataError(
                path, f"{key} holds {int(array.min())}", "Classes are numbered from 0; --task regression is for amounts"
            )
    found = np.unique(np.concatenate([train, test]))
    if len(found) == 1:
        raise DataError(
            path, f"all labels are {found[0]}", "Give examples of two classes or more, or another column as --label"
        )
    if train.dtype.kind == "U":
        names, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
        return _numbered(tuple(map(str, names)), numbers[: len(train)], numbers[len(train) :])
    count = int(max(train.max(), test.max())) + 1
    if count > len(train):
        raise DataError(
            path,
            f"its highest label is {count - 1}, but there are only {len(train)} training entries",
            "Number the classes 0, 1, 2, …, or take --task regression",
        )
    return _numbered(tuple(map(str, range(count))), train, test)


def _numbered(names: tuple[str, ...], train: Array, test: Array) -> ReadLabels:
    return ReadLabels("classification", names, *(torch.from_numpy(array.astype(np.int64)) for array in (train, test)))
