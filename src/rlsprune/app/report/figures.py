"""The parts of a page that are drawn without a script: the network to scale, and the inputs that it reads."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsprune.app.report.png import Pixel, data_uri
from rlsprune.app.report.runs import ReportedLayer, ReportedRun
from rlsprune.io.atomic import FileError

__all__ = ["Inputs", "Slice", "draw_inputs", "draw_network", "ranges"]

_HAIR = 1.5  # thousandths: the least width that is drawn, so that every layer is visible
_MOST_PIXELS = 2**18
_MOST_DIMENSIONS = 8
_GONE: Pixel = (214, 69, 65)


@dataclass(frozen=True)
class Slice:
    """A layer's part of the drawing: half widths from the middle, in thousandths of the widest layer."""

    layer: ReportedLayer
    before: float
    after: float
    before_next: float | None
    """The half width before pruning of the layer below, to which edges lead; None for the last layer."""
    after_next: float | None
    """The half width after pruning of that layer."""


@dataclass(frozen=True)
class Inputs:
    """The inputs that a network reads."""

    kept: int
    total: int
    image: str | None
    """The address of a picture, if the inputs are one."""
    width: int
    height: int
    listed: str
    """The indices of the inputs that are read, in words."""
    read: tuple[str, ...]
    """The names of the inputs that are read; empty if the inputs have no names."""
    left_out: tuple[str, ...]
    """The names of the other inputs."""


def draw_network(layers: Sequence[ReportedLayer], unit: str = "channels") -> list[Slice]:
    """Draws the layers from the input down with widths to scale, by their "channels" or their "nodes"."""
    sizes = [getattr(layer, unit) for layer in layers]
    full = [getattr(layer, f"full_{unit}") or size for layer, size in zip(layers, sizes, strict=True)]
    widest = max(full, default=0) or 1
    before = [max(_HAIR, 500 * size / widest) for size in full]
    after = [max(_HAIR, 500 * size / widest) for size in sizes]
    below: list[tuple[float | None, float | None]] = [*zip(before[1:], after[1:], strict=True), (None, None)]
    rows = zip(layers, before, after, below, strict=False)  # `below` has one row even without layers
    return [Slice(layer, was, now, *following) for layer, was, now, following in rows]


def draw_inputs(run: ReportedRun) -> Inputs | None:
    """Draws the inputs that the network still reads; None if no input was pruned or the run is not over."""
    summary = run.summary
    if summary is None or summary.get("kept_inputs") is None:
        return None
    kept = set(summary["kept_inputs"])
    shape = _shape(run, summary)
    full = run.layers[0].full_nodes if run.layers else None
    total = math.prod(shape) if shape else full or max(kept, default=-1) + 1
    if kept and max(kept) >= total:
        raise FileError(
            run.path / "summary.json", f"it keeps input {max(kept)} of {total}", "restore it, or start the run again"
        )
    image, width, height = None, 0, 0
    if len(shape) == 3 and shape[0] == 1 and total <= _MOST_PIXELS:
        _, height, width = shape
        image = data_uri(_pixels(kept, _mean(run, summary, total)), width, height)
    names = _names(run, total)
    read = tuple(name for index, name in enumerate(names) if index in kept)
    left_out = tuple(name for index, name in enumerate(names) if index not in kept)
    return Inputs(len(kept), total, image, width, height, ranges(sorted(kept)), read, left_out)


def ranges(indices: Sequence[int]) -> str:
    """Writes sorted indices in words: 0–3, 7, 9–10."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{first}–{last}" if last > first else str(first) for first, last in runs)


def _names(run: ReportedRun, total: int) -> list[str]:
    """Returns the names of a table's columns if the config has them, else nothing."""
    columns = run.config.get("columns") or []
    sound = isinstance(columns, list) and len(columns) == total
    return [str(name) for name in columns] if sound else []


def _shape(run: ReportedRun, summary: dict[str, Any]) -> list[int]:
    shape = summary.get("input_shape") or []
    sound = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not sound or not all(isinstance(size, int) and 0 < size <= 4096 for size in shape):
        raise FileError(
            run.path / "summary.json", f"its input_shape is {shape!r}", "restore it, or start the run again"
        )
    return shape


def _mean(run: ReportedRun, summary: dict[str, Any], total: int) -> bytes:
    """Returns the background of the inputs: the mean image, or an even grey."""
    text = summary.get("mean_input")
    if text is None:
        return bytes([96]) * total
    try:
        mean = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        remedy = "restore it, or start the run again"
        raise FileError(run.path / "summary.json", f"its mean_input is not base64 ({error})", remedy) from error
    if len(mean) != total:
        remedy = "restore it, or start the run again"
        raise FileError(run.path / "summary.json", f"its mean_input has {len(mean)} of {total} values", remedy)
    return mean


def _pixels(kept: set[int], mean: bytes) -> list[Pixel]:
    """Returns the mean image as ink on paper, tinted red where an input is not read."""
    brightest = max(mean) or 1
    pixels = []
    for index, value in enumerate(mean):
        paper = 255 - round(200 * value / brightest)
        pixels.append((paper, paper, paper) if index in kept else _tinted(paper))
    return pixels


def _tinted(paper: int) -> Pixel:
    red, green, blue = (round(0.75 * part + 0.25 * paper) for part in _GONE)
    return red, green, blue
