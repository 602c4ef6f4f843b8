"""Files for deployment, which need neither this package nor the model's class: torch.export programs and ONNX.

The first dimension of the inputs is the batch and may have any size in the exported model. Each file is run before it
takes its place: on the example inputs and on another batch size it must give the model's outputs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rlsprune.io.atomic import check_name, replacing
from rlsprune.model.arguments import shown
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.demands import check_network
from rlsprune.model.modes import inference, plain_attention
from rlsprune.model.progress import shown_progress

__all__ = ["ExportError", "export_onnx", "export_program"]

TOLERANCE = 1e-5  # on the outputs, relative to the largest of them if that is above 1

_TALKATIVE = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes")

ExportCall = tuple[tuple[Any, ...], dict[str, Any]]


class _Reference(NamedTuple):
    """The model's outputs for one call."""

    size: int
    call: ExportCall
    outputs: list[Tensor]


class ExportError(RuntimeError):
    """Raised if a model cannot be exported, or if its exported form computes different outputs."""


def export_program(model: nn.Module, example_inputs: ExampleInputs, path: str | os.PathLike[str]) -> None:
    """Writes the model's inference as a `torch.export` program; `torch.export.load(path).module()` runs it.

    Args:
        model: The model, in any mode; it is exported as in `eval()` and not changed.
        example_inputs: A tensor, a tuple of arguments or a dict of keyword arguments, batch first.
        path: The file, ending in `.pt2`.

    Raises:
        ExportError: If the model cannot be traced with a variable batch, or the file computes other outputs.
        OSError: If the file cannot be written.

    Examples:
        >>> import torch
        >>> export_program(torch.nn.Linear(4, 2), torch.rand(1, 4), "small.pt2")
        >>> torch.export.load("small.pt2").module()(torch.rand(8, 4)).shape
        torch.Size([8, 2])
    """
    check_name(path)
    check_network(model)
    if Path(path).suffix != ".pt2":
        raise ValueError(f"{os.fspath(path)}: programs of torch.export are kept in files that end in .pt2; name it so")
    with shown_progress() as tell, inference(model, example_inputs) as (plain, args, kwargs), plain_attention():
        tell(f"exporting to {Path(path).name}", 0, None)
        references = _references(plain, (args, kwargs), path)
        args, kwargs = references[-1].call
        with _explained(plain, path):
            _name_arguments(plain, kwargs)
            shapes = _dynamic_shapes(plain, references[-1].call)
            program = torch.export.export(plain, args, kwargs, dynamic_shapes=shapes, strict=False)
        with replacing(path) as temporary:
            torch.export.save(program, temporary)
            loaded = torch.export.load(temporary).module()
            with _explained(plain, path):
                _verify(references, lambda args, kwargs: tree_leaves(loaded(*args, **kwargs)), path)


def export_onnx(
    model: nn.Module,
    example_inputs: ExampleInputs,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the model's inference as one ONNX file. Needs the extra `rlsprune[onnx]`.

    Args:
        model: The model, in any mode; it is exported as in `eval()` and not changed.
        example_inputs: A tensor, a tuple of arguments or a dict of keyword arguments, batch first.
        path: The file, which usually ends in `.onnx`.
        metadata: Texts by name for the file; onnxruntime returns them as
            ``session.get_modelmeta().custom_metadata_map``.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is not installed.
        ExportError: If the model cannot be traced with a variable batch, or the file computes other outputs.
        OSError: If the file cannot be written.

    Examples:
        >>> import onnxruntime, torch
        >>> export_onnx(torch.nn.Linear(4, 2), torch.rand(1, 4), "small.onnx")
        >>> session = onnxruntime.InferenceSession("small.onnx")
        >>> session.run(None, {session.get_inputs()[0].name: torch.rand(8, 4).numpy()})[0].shape
        (8, 2)
    """
    check_name(path)
    check_network(model)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is {shown(metadata)}: give a dict, or None")
    for entry in (metadata or {}).items():
        if not all(isinstance(text, str) for text in entry):
            raise TypeError(f"metadata holds {shown(entry)}: ONNX files take texts by name")
    runtime = _onnx_runtime()
    with shown_progress() as tell, inference(model, example_inputs) as (plain, args, kwargs), plain_attention():
        tell(f"exporting to {Path(path).name}", 0, None)
        # onnxruntime runs on the CPU, so the reference does, too.
        plain = copy.deepcopy(plain).cpu()
        references = _references(plain, tree_map(_on_cpu, (args, kwargs)), path)
        args, kwargs = references[-1].call
        with _explained(plain, path), _quiet():
            _name_arguments(plain, kwargs)
            shapes = _dynamic_shapes(plain, references[-1].call)
            program = torch.onnx.export(plain, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
        if program is None:
            raise ExportError(f"torch.onnx gave no program for {type(plain).__name__}: it may be older than 2.6")
        program.model.metadata_props.update(metadata or {})
        with replacing(path) as temporary:
            program.save(temporary, external_data=False)
            tell(f"checking {Path(path).name}", 0, None)
            with _explained(plain, path):
                engine = runtime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
            names = [node.name for node in engine.get_inputs()]

            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
                leaves = _tensors((args, kwargs))
                feeds = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
                return [torch.as_tensor(value) for value in engine.run(None, feeds)]

            with _explained(plain, path):
                _verify(references, run, path)


def _onnx_runtime() -> Any:
    try:
        for needed in ("onnx", "onnxscript"):
            importlib.import_module(needed)
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(f"export_onnx needs {error.name}: pip install 'rlsprune[onnx]'", name=error.name) from error


@contextlib.contextmanager
def _explained(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the tracers raise nearly every type there is
        raise ExportError(
            f"{type(model).__name__} cannot be exported to {os.fspath(path)} with a batch of variable size: its "
            f"forward must not branch on the batch's size or on values of tensors, and must read that size as "
            f"x.shape[0], because len(x) fixes it ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """Returns the first line of the tracer's message, uncoloured. torch.onnx adds advice for its own developers."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error.__cause__ or error)).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's messages about other packages and itself, and the programs that it prints on failures."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _batch_size(call: ExportCall) -> int:
    for leaf in tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0]:
            return int(leaf.shape[0])
    raise ValueError("example_inputs hold no tensor with a batch dimension: give at least one example")


def _resized(call: ExportCall, size: int) -> ExportCall:
    """Returns the call with its examples repeated to a batch of `size`; tensors without the batch dimension stay."""
    batch = _batch_size(call)

    def resize(leaf: Any) -> Any:
        if not _is_batched(leaf, batch):
            return leaf
        return leaf.index_select(0, torch.arange(size, device=leaf.device) % batch)

    resized: ExportCall = tree_map(resize, call)
    return resized


def _is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _references(model: nn.Module, call: ExportCall, path: str | os.PathLike[str]) -> list[_Reference]:
    """Runs the model on the examples, and on one more of them, as a batch of one is too small to trace with."""
    batch = _batch_size(call)
    references = []
    for size in (batch, batch + 1):
        args, kwargs = _resized(call, size)
        with _explained(model, path):
            references.append(_Reference(size, (args, kwargs), _tensors(model(*args, **kwargs))))
    return references


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _dynamic_shapes(model: nn.Module, call: ExportCall) -> dict[str, Any]:
    """Returns the variable dimensions by the names of the forward's arguments; ``*xs`` count as one argument."""
    size = _batch_size(call)
    batch = torch.export.Dim("batch", min=1)
    args, kwargs = call
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs).arguments
    return {
        name: tree_map(lambda leaf: {0: batch} if _is_batched(leaf, size) else None, value)
        for name, value in bound.items()
    }


def _name_arguments(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Adds the arguments that a forward takes by ``**named`` to its signature: torch.export follows no others.

    Args:
        model: A copy of the user's model; its forward is replaced by one that does the same.
        kwargs: The keyword arguments of the call.
    """
    forward: Callable[..., Any] = model.forward
    signature = inspect.signature(forward)
    known = [own for own in signature.parameters.values() if own.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(known) == len(signature.parameters):
        return
    listed = {own.name for own in known}
    named = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in kwargs if key not in listed]

    def renamed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=[*known, *named])  # type: ignore[attr-defined]
    model.forward = renamed


def _verify(references: list[_Reference], run: Callable[..., list[Any]], path: str | os.PathLike[str]) -> None:
    """Raises if the file's outputs differ from the model's."""
    for size, (args, kwargs), expected in references:
        found = _tensors(run(args, kwargs))
        if len(found) != len(expected):
            raise ExportError(f"{os.fspath(path)} gives {len(found)} tensors, the model {len(expected)}: not written")
        for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            error, allowed = _difference(ours, theirs)
            if not error <= allowed:
                raise ExportError(
                    f"output {index} of {os.fspath(path)} differs from the model's by {error:.3g}, {allowed:.3g} is "
                    f"allowed, at a batch of {size}: nothing was written; is the forward random, or does it branch?"
                )


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Returns the largest difference of two outputs (infinite if shapes or dtypes differ), and the allowed one."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf"), 0.0
    if not ours.numel() or torch.equal(ours, theirs):
        return 0.0, TOLERANCE
    a, b = ours.detach().cpu().to(torch.float64), theirs.detach().cpu().to(torch.float64)
    coarse = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0  # above 1e-5 for half precision
    # NaN and infinity must be in the same places; where they are, they do not count.
    special = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    error = (a - b).abs().masked_fill(special, 0.0).max().item()
    scale = max(1.0, a.masked_fill(~a.isfinite(), 0.0).abs().max().item())
    return error, max(TOLERANCE, 8 * coarse) * scale
