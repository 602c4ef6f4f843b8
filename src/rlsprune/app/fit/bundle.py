"""Files that deploy a finished model: an ONNX file that describes its inputs, one in 8 bits, and predict.py."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.app.data.datasets import Dataset, stratified_choice
from rlsprune.app.run.recipe import Recipe
from rlsprune.app.run.scores import Scoring
from rlsprune.io.atomic import file_digest, replacing, storing
from rlsprune.io.export import export_onnx
from rlsprune.io.quantize import quantize_onnx
from rlsprune.model.selector import kept_features

__all__ = ["DIGESTS", "INT8", "ONNX", "PREDICT", "is_written", "with_digests", "write_int8", "write_onnx"]

ONNX, INT8, PREDICT = "model.onnx", "model-int8.onnx", "predict.py"
DIGESTS = "sha256"
"""Key of the summary for the digests of these files."""
_CALIBRATION = 512  # examples from which the ranges of the activations are taken


def write_onnx(model: nn.Module, recipe: Recipe, data: Dataset, folder: Path) -> None:
    """Writes model.onnx, with the names and scales of inputs and outputs in its metadata, and predict.py.

    Args:
        model: The saved model, which takes inputs as the user has them.
        recipe: The run's recipe.
        data: The data as they were read.
        folder: The folder to write to.
    """
    export_onnx(model, recipe.example(2), folder / ONNX, metadata=_metadata(model, recipe, data))
    with storing(folder / PREDICT), replacing(folder / PREDICT) as path:
        path.write_text(files(__package__).joinpath(PREDICT).read_text(encoding="utf-8"), encoding="utf-8")


def write_int8(recipe: Recipe, data: Dataset, folder: Path) -> dict[str, float]:
    """Writes model-int8.onnx from model.onnx and returns its scores on the test split, by the names of the metrics."""
    as_read = replace(recipe, data=data)
    some = stratified_choice(data.train.labels, min(_CALIBRATION, len(data.train)), seed=0)
    batches = as_read.evaluation_batches(data.train.select(some))
    inputs = (inputs for inputs, _ in batches)
    quantize_onnx(folder / ONNX, folder / INT8, inputs, float_outputs=data.task == "regression")
    scoring = Scoring(recipe.scoring.task, recipe.scoring.metrics)
    network = _Session(folder / INT8)
    found = scoring(network, as_read.evaluation_batches(data.test), recipe.loss).scores
    return {f"int8_{name}": score for name, score in found.items()}


def is_written(summary: Mapping[str, Any], folder: Path, *names: str) -> bool:
    """Returns whether these files exist and the summary, which is written after them, has their digests."""
    known = summary.get(DIGESTS, {})
    return all(name in known and (folder / name).exists() for name in names)


def with_digests(summary: Mapping[str, Any], folder: Path, *names: str) -> dict[str, Any]:
    """Adds the digests of these files to the summary; `rlsprune check` compares them."""
    return {**summary, DIGESTS: {**summary.get(DIGESTS, {}), **{name: file_digest(folder / name) for name in names}}}


def _metadata(model: nn.Module, recipe: Recipe, data: Dataset) -> dict[str, str]:
    """Returns everything that a program needs to call the network, lists as JSON; predict.py reads it."""
    features = math.prod(data.shape)
    kept = next(iter(kept_features(model).values()), list(range(features)))
    return {
        "task": data.task,
        "loss": str(recipe.config["loss"]),
        "classes": json.dumps(data.classes, ensure_ascii=False),
        "columns": json.dumps(data.columns, ensure_ascii=False),
        "inputs_read": json.dumps(kept),
        "input_shape": json.dumps(data.shape),
        "divide_by": "255" if data.train.images.dtype == torch.uint8 else "1",
    }


class _Session(nn.Module):
    """An ONNX file as a network."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        runtime: Any = importlib.import_module("onnxruntime")
        self._session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run(None, {self._input: inputs.cpu().numpy()})[0]).to(inputs.device)
