"""A user's own `torch.utils.data.Dataset` objects, read into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.folders import TEST_SHARE
from rlsprune.app.data.labels import Array, read_labels

__all__ = ["read_objects"]

_RETURN = "Return (train, test), datasets of (input, label) pairs"


def read_objects(name: str, make: Callable[[], Any], task: str | None = None, seed: int = 0) -> Dataset:
    """Reads every example once; a fifth of a single data set is set aside for testing.

    Args:
        name: The name of the data for messages, ``module:function``.
        make: Function that returns the training and the test data set, as a pair or as a mapping of "train" and
            "test", or one data set for both.
        task: The task of the labels; None to guess.
        seed: The seed of the choice of the test examples.

    Raises:
        DataError: The function returns something else, or examples of several shapes.
    """
    found = make()
    if isinstance(found, Mapping):
        found = [found[part] for part in ("train", "test") if part in found]
    parts = list(found) if isinstance(found, tuple | list) else [found]
    if not 1 <= len(parts) <= 2:
        raise DataError(name, f"it returns {len(parts)} data sets", _RETURN)
    inputs, labels = zip(*(_read(name, part) for part in parts), strict=True)
    if inputs[0].shape[1:] != inputs[-1].shape[1:] or inputs[0].dtype != inputs[-1].dtype:
        shapes = [f"{part.dtype} of {tuple(part.shape)}" for part in inputs]
        raise DataError(name, f"its training inputs are {shapes[0]}, the test inputs {shapes[1]}", "Make them alike")
    told = read_labels(Path(name), labels[0], labels[-1], task)
    names = getattr(parts[0], "classes", None)  # torchvision's data sets have it
    if told.task == "classification" and isinstance(names, Sequence) and len(names) >= len(told.names):
        told = told._replace(names=tuple(map(str, names)))
    splits = Split(inputs[0], told.train), Split(inputs[-1], told.test)
    data = Dataset(name.rpartition(":")[2], told.names, *splits, task=told.task)
    if len(parts) == 2:
        return data
    held = data.hold_out(max(1, round(TEST_SHARE * len(data.train))), seed)
    assert held.valid is not None
    return replace(held, test=held.valid, valid=None)


def _read(name: str, data: Any) -> tuple[Tensor, Array]:
    inputs: list[Tensor] = []
    labels: list[Any] = []
    for number in range(len(data)) if hasattr(data, "__len__") else ():
        try:
            example = data[number]
        except Exception as error:  # a user's own code may raise any error
            problem = f"example {number} of its {type(data).__name__} cannot be read ({_told(error)})"
            raise DataError(name, problem, _RETURN) from error
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise DataError(name, f"example {number} is a {type(example).__name__}, not a pair", _RETURN)
        try:
            inputs.append(torch.as_tensor(example[0]))
            labels.append(np.asarray(example[1]))
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = " and ".join(type(part).__name__ for part in example)
            problem = f"example {number} is of {kinds}, not of numbers ({_told(error)})"
            raise DataError(name, problem, "Give a tensor or an array (ToTensor) and a label") from error
        if labels[-1].shape != labels[0].shape:
            problem = f"the label of example {number} has shape {labels[-1].shape}, unlike the first"
            raise DataError(name, problem, "Give all labels one shape")
        if inputs[-1].shape != inputs[0].shape or inputs[-1].dtype != inputs[0].dtype:
            problem = f"example {number} is {inputs[-1].dtype} of {tuple(inputs[-1].shape)}, unlike the first"
            raise DataError(name, problem, "Give all one shape and type (Resize, ToTensor)")
    if not inputs:
        raise DataError(name, f"it returns a {type(data).__name__} without examples", _RETURN)
    stacked = torch.stack(inputs)
    if stacked.dtype != torch.uint8:
        stacked = stacked.to(torch.float32)
    if stacked.ndim < 2 or not bool(stacked.isfinite().all()):
        problem = f"its inputs are of shape {tuple(stacked.shape)}, or not all finite"
        raise DataError(name, problem, "Give finite numbers of shape (features,) or (channels, height, width)")
    return stacked, np.stack(labels)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
