"""A user's own table from CSV or Parquet, with the names of its columns. pandas reads both, Parquet through pyarrow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.folders import TEST_SHARE
from rlsprune.app.data.labels import read_labels
from rlsprune.app.data.streams import open_regular
from rlsprune.model.arguments import quoted

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["SUFFIXES", "read_table", "table_parts"]

SUFFIXES = (".csv", ".tsv", ".parquet")
_WRITE = "Give a table with a line of names and a line per example"
_TEST_NAMES = ("test", "val", "valid")


def table_parts(path: Path) -> list[Path]:
    """Returns the file itself, or the training and the test table of a folder; empty if there is no table."""
    if path.suffix in SUFFIXES:
        return [path]
    train = next((path / f"train{suffix}" for suffix in SUFFIXES if (path / f"train{suffix}").is_file()), None)
    if train is None:
        return []
    tests = [path / f"{name}{suffix}" for name in _TEST_NAMES for suffix in SUFFIXES]
    test = next((file for file in tests if file.is_file()), None)
    if test is None:
        raise DataError(path, f"it has {train.name} but no test{train.suffix}", "Add one, or give the file itself")
    return [train, test]


def read_table(
    path: str | os.PathLike[str],
    labels: Sequence[str] = (),
    drop: Sequence[str] = (),
    task: str | None = None,
    seed: int = 0,
) -> Dataset:
    """Reads a table; a fifth of the rows of a single file is set aside for testing.

    Args:
        path: A file, or a folder that holds ``train.csv`` and ``test.csv`` (or Parquet).
        labels: The columns to predict; empty for the last one.
        drop: The columns to leave out.
        task: The task of the labels; None to guess.
        seed: The seed of the choice of the test rows.

    Raises:
        DataError: The table is missing or damaged, or holds something other than numbers.
    """
    parts = table_parts(Path(path))
    if not parts:
        raise DataError(path, "there is no such table", f"Give a file that ends in {', '.join(SUFFIXES)}")
    frames = [_read(part) for part in parts]
    columns = list(frames[0].columns)
    if len(set(labels)) < len(labels):
        raise DataError(parts[0], f"--label names one column twice: {quoted(labels)}", "Name each once")
    for name in (*labels, *drop):
        if name not in columns:
            raise DataError(parts[0], f"it has no column {name!r}; it has {quoted(columns)}", "Name one of these")
    if len(parts) > 1 and set(frames[1].columns) != set(columns):
        odd = quoted(sorted(set(frames[1].columns) ^ set(columns)))
        raise DataError(parts[1], f"its columns are not those of {parts[0].name}: {odd}", "Give both the same columns")
    wanted = list(labels) or columns[-1:]
    read = [name for name in columns if name not in wanted and name not in drop]
    if not read:
        raise DataError(parts[0], "no column is left to predict from", "Give more columns, or fewer labels")
    inputs = [_inputs(part, frame, read) for part, frame in zip(parts, frames, strict=True)]
    targets = [_targets(part, frame, wanted, task) for part, frame in zip(parts, frames, strict=True)]
    found = read_labels(parts[0], targets[0], targets[-1], task, wanted)
    splits = [Split(torch.from_numpy(x), y) for x, y in zip(inputs, (found.train, found.test), strict=False)]
    data = Dataset(Path(path).stem, found.names, splits[0], splits[-1], task=found.task, columns=tuple(read))
    if len(parts) > 1:
        return data
    if len(data.train) < 2:
        raise DataError(parts[0], f"it has {len(data.train)} rows", "Give more: a fifth is set aside for testing")
    held = data.hold_out(max(1, round(TEST_SHARE * len(data.train))), seed)
    assert held.valid is not None
    return replace(held, test=held.valid, valid=None)


def _read(path: Path) -> DataFrame:
    try:
        import pandas
    except ImportError as error:
        remedy = 'Install it with `pip install "rlsprune[cli]"`'
        raise DataError(path, "tables are read by pandas, which is not installed", remedy) from error
    try:
        with open_regular(path, _WRITE) as (file, _):
            if path.suffix == ".parquet":
                frame = pandas.read_parquet(file, engine="pyarrow")
            else:
                form: Any = {"sep": "\t" if path.suffix == ".tsv" else ",", "skipinitialspace": True}
                head = pandas.read_csv(file, **form, header=None, nrows=1, dtype=str, keep_default_na=False)
                _check_names(path, [name.strip() for name in head.iloc[0]])  # pandas would rename a duplicate
                file.seek(0)
                frame = pandas.read_csv(file, **form)
    except DataError:
        raise
    except ImportError as error:
        remedy = 'Install it with `pip install "rlsprune[parquet]"`'
        raise DataError(path, "Parquet is read by pyarrow, which is not installed", remedy) from error
    except MemoryError as error:
        raise DataError(path, "there is not enough memory to read it", "Free some memory and try again") from error
    except Exception as error:  # damaged files make readers raise any error
        raise DataError(path, f"it is not a table that pandas reads ({str(error)[:200]})", _WRITE) from error
    frame.columns = [str(name).strip() for name in frame.columns]
    _check_names(path, list(frame.columns))
    if frame.empty:
        raise DataError(path, "it has no rows", _WRITE)
    return frame


def _check_names(path: Path, names: list[str]) -> None:
    twice = next((name for number, name in enumerate(names) if name and name in names[:number]), None)
    if twice is not None:
        raise DataError(path, f"it has two columns {twice!r}", "Give each its own name")
    if len(names) == 1 and any(mark in names[0] for mark in ";,|\t"):
        remedy = "Separate columns by commas in .csv, by tabs in .tsv"
        raise DataError(path, f"it has only one column, {names[0][:80]!r}", remedy)


def _inputs(path: Path, frame: DataFrame, names: Sequence[str]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # values that do not fit become infinite
        columns = [_numbers(path, name, frame[name]).astype(np.float32) for name in names]
    for name, column in zip(names, columns, strict=True):
        _check_finite(path, name, column)
    return np.stack(columns, 1)


def _targets(path: Path, frame: DataFrame, names: Sequence[str], task: str | None) -> npt.NDArray[Any]:
    if len(names) > 1:
        return np.stack([_numbers(path, name, frame[name]) for name in names], 1)
    column = frame[names[0]]
    if column.isna().any():
        raise _missing(path, names[0], int(column.isna().to_numpy().argmax()))
    values = column.to_numpy()
    numbers = "uif" if task in (None, "classification") else "uifb"  # True and False are names of classes
    return values if values.dtype.kind in numbers else column.astype(str).str.strip().to_numpy(dtype=np.str_)


def _numbers(path: Path, name: str, column: Series) -> npt.NDArray[Any]:
    if column.isna().any():
        raise _missing(path, name, int(column.isna().to_numpy().argmax()))
    values = column.to_numpy()
    if values.dtype.kind not in "uifb":
        example = str(values[0])[:40]
        raise DataError(
            path,
            f"column {name!r} holds {example!r}, which is not a number",
            f"Turn it into numbers (one column for each of its values, say), or leave it out: --drop-columns {name}",
        )
    return values


def _check_finite(path: Path, name: str, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax()) + 1
        raise DataError(
            path, f"column {name!r} is infinite or too large in row {row}", "Replace or leave out such rows"
        )


def _missing(path: Path, name: str, row: int) -> DataError:
    return DataError(
        path,
        f"column {name!r} has no value in row {row + 1}, or a marker of a missing one (NA, null, nan)",
        "Fill it in (its median, say), leave the row out, or leave the column out: --drop-columns. Rename a class 'NA'",
    )
