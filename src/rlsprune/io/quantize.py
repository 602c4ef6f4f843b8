"""Quantization of an exported network to 8-bit integers, by ONNX Runtime's own tools."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlsprune.io.atomic import check_name, replacing
from rlsprune.model.arguments import check_iterable

__all__ = ["quantize_onnx"]

_CARRIERS = ("Cast", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def quantize_onnx(
    source: str | os.PathLike[str], path: str | os.PathLike[str], batches: Iterable[Any], *, float_outputs: bool = False
) -> None:
    """Writes an ONNX file with 8-bit weights and activations. Needs the extra `rlsprune[onnx]`.

    Weights are scaled channel by channel, activations by their range on the given batches. Layers that read
    columns of very different ranges, such as those of a table, stay in floating point: one scale for all would round
    the small ones to zero. Measure the accuracy afterwards, because it changes, usually a little.

    Args:
        source: A file with one input, as `rlsprune.export_onnx` writes it.
        path: The new file.
        batches: A few hundred representative inputs, as tensors, or (inputs, labels) pairs as a data loader gives them.
        float_outputs: Whether the output layers stay in floating point, for outputs whose deviation is small compared
            with their mean, which 8 bits cannot resolve.

    Raises:
        ImportError: onnxruntime or onnx is not installed.
        ValueError: There is no batch, the network has more than one input, or the batches do not fit it: another
            shape or dtype, or numbers that are not finite.
        OSError: A file cannot be read or written.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> inputs = torch.rand(256, 8)
        >>> rlsprune.export_onnx(model, inputs[:2], "small.onnx")
        >>> rlsprune.quantize_onnx("small.onnx", "small-int8.onnx", inputs.split(64))
    """
    for name in (source, path):
        check_name(name)
    if not Path(source).is_file():
        raise FileNotFoundError(f"{os.fspath(source)}: there is no such file; write it with rlsprune.export_onnx first")
    try:
        runtime = importlib.import_module("onnxruntime")
        tools = importlib.import_module("onnxruntime.quantization")
        preparation = importlib.import_module("onnxruntime.quantization.shape_inference")
    except ImportError as error:
        raise ImportError(f"quantize_onnx needs {error.name}: pip install 'rlsprune[onnx]'", name=error.name) from error
    if isinstance(batches, Tensor):
        raise ValueError("batches is a tensor: give an iterable of them, such as inputs.split(64)")
    check_iterable("batches", batches, "give a list of inputs or a DataLoader")
    nodes = _session(runtime, source).get_inputs()
    if len(nodes) != 1:
        names = ", ".join(node.name for node in nodes)
        raise ValueError(f"{os.fspath(source)} has the inputs {names}: quantize_onnx takes networks with one")
    feeds = [{nodes[0].name: _checked(_array(batch), nodes[0])} for batch in batches]
    if not feeds:
        raise ValueError("batches is empty: give a few hundred inputs like those that the network will see")

    class CalibrationReader(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]
        """The feeds, which the tools request one by one."""

        def __init__(self) -> None:
            self._feeds: Iterator[Any] = iter(feeds)

        def get_next(self) -> Any:
            return next(self._feeds, None)

    with tempfile.TemporaryDirectory() as folder, _quiet(), replacing(path) as temporary:
        prepared = Path(folder) / "prepared.onnx"
        preparation.quant_pre_process(os.fspath(source), str(prepared), skip_symbolic_shape=True)
        kept = _first_layers(prepared) if _ranges_differ(feeds) else []
        kept += _last_layers(prepared) if float_outputs else []
        tools.quantize_static(
            str(prepared),
            str(temporary),
            CalibrationReader(),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            weight_type=tools.QuantType.QInt8,
            activation_type=tools.QuantType.QUInt8,
            nodes_to_exclude=kept,
            # Without it, x86 processors without VNNI silently saturate their 16-bit sums: outputs were 13 % off.
            reduce_range=True,
        )
        _session(runtime, temporary).run(None, feeds[0])  # a file that does not run must not take its place


def _ranges_differ(feeds: list[dict[str, Any]]) -> bool:
    """Whether the inputs are rows whose median column has less than an eighth of the range of the widest one."""
    arrays = [array for feed in feeds for array in feed.values()]
    if any(array.ndim != 2 or array.dtype.kind != "f" for array in arrays):
        return False
    ranges = np.max([np.abs(array).max(0) for array in arrays], 0)
    return bool(np.median(ranges[ranges > 0]) < ranges.max() / 8) if ranges.any() else False


def _first_layers(path: Path) -> list[str]:
    """Returns the names of the nodes that compute with the network's inputs; nodes that only pick or reshape do not."""
    onnx: Any = importlib.import_module("onnx")
    graph = onnx.load(str(path)).graph
    weights = {tensor.name for tensor in graph.initializer}
    carried = {node.name for node in graph.input} - weights
    found = []
    for node in graph.node:  # in the order in which they run
        if carried.isdisjoint(node.input):
            continue
        if node.op_type in _CARRIERS:
            carried.update(node.output)
        else:
            found.append(node.name)
    return found


def _last_layers(path: Path) -> list[str]:
    """Returns the names of the nodes that compute the network's outputs, and of those that then pick or reshape."""
    onnx: Any = importlib.import_module("onnx")
    graph = onnx.load(str(path)).graph
    carried = {node.name for node in graph.output}
    found = []
    for node in reversed(graph.node):
        if carried.isdisjoint(node.output):
            continue
        found.append(node.name)
        if node.op_type in (*_CARRIERS, "Add"):  # Add: a separate bias
            carried.update(node.input)
    return found


def _session(runtime: Any, path: str | os.PathLike[str]) -> Any:
    return runtime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])


def _array(batch: Any) -> Any:
    inputs = batch if isinstance(batch, Tensor) else batch[0]
    return inputs.detach().cpu().numpy()


def _checked(array: Any, node: Any) -> Any:
    """Returns the array if it fits the network's input, and raises otherwise. Symbolic sizes fit any size."""
    fits = len(array.shape) == len(node.shape) and all(
        not isinstance(wanted, int) or wanted == size for wanted, size in zip(node.shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"batches holds inputs of shape {tuple(array.shape)}, the network takes {tuple(node.shape)}")
    kind = {"float32": "tensor(float)", "float64": "tensor(double)"}.get(str(array.dtype), f"tensor({array.dtype})")
    if kind != node.type:
        raise ValueError(f"batches holds inputs of type {kind}, the network takes {node.type}: convert them")
    if array.dtype.kind == "f" and not (abs(array) < float("inf")).all():
        raise ValueError("batches holds inputs that are not finite, so their range cannot be measured: leave them out")
    return array


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the tools' advice on the root logger, as it is already followed."""
    logger = logging.getLogger()
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled
