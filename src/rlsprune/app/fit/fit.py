"""The run of a user's own network, and what it delivers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rlsprune.app.config.base import BATCH_NORM_RATE, LEARNING_RATES
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.data.arrays import read_npz
from rlsprune.app.data.datasets import Dataset
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.folders import Channels, read_image_folder
from rlsprune.app.fit.model import find_builder, find_layout, load_weights
from rlsprune.app.fit.standardise import find_standardisation
from rlsprune.app.run.build import build_recipe, hold_out
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.recipe import Recipe
from rlsprune.distributed.torchrun import leads
from rlsprune.io import modelfile
from rlsprune.io.export import export_onnx
from rlsprune.training.loop import evaluate

__all__ = ["ONNX_PACKAGES", "fit", "load_own_data", "make_own_recipe", "missing_onnx_packages"]

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def fit(
    config: FitConfig,
    folder: RunFolder,
    observer: Observer | None = None,
    baseline_observer: Callable[[], Observer] = Observer,
) -> dict[str, Any]:
    """Trains and prunes as the config says, or goes on with it, and writes model.safetensors and model.onnx.

    The ONNX file is left out where its packages are not installed (`missing_onnx_packages`).

    Args:
        config: The run.
        folder: Where its files go.
        observer: Who is told about it.
        baseline_observer: Makes the one who is told about the unpruned network, if the config asks for that too.

    Returns:
        The summary, as in the folder's summary.json.

    Raises:
        ValueError: Model, data and weights do not fit each other. Nothing has been written then.
        ExportError: The network cannot be exported; everything else has been written.
    """
    loaded = load_own_data(config)
    recipe = make_own_recipe(config, loaded)
    summary = folder.read_summary() if folder.finished else train_and_prune(recipe, folder, observer)
    if config.baseline and "unpruned_accuracy" not in summary:
        twin, beside = config.unpruned(), type(folder)(folder.path / "unpruned")
        unpruned = (
            beside.read_summary()
            if beside.finished
            else train_and_prune(make_own_recipe(twin, load_own_data(twin)), beside, baseline_observer())
        )
        summary = {**summary, "unpruned_accuracy": unpruned["accuracy"]}
        with folder.locked():
            folder.write_json("summary", summary)
    onnx = folder.path / "model.onnx"
    if leads() and not onnx.exists() and not missing_onnx_packages():
        model = modelfile.load(folder.model, into=recipe.build_model())
        with folder.locked():
            export_onnx(model, recipe.example(2), onnx)
    return summary


def missing_onnx_packages() -> list[str]:
    """What an ONNX file would need and is not installed."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]


def load_own_data(config: FitConfig) -> Dataset:
    """The data in memory, on the run's device, with images held out if the gate wants them.

    Raises:
        DataError: They are missing, damaged, or not those with which the run was started.
    """
    path = Path(config.data)
    if path.is_dir():
        loaded = read_image_folder(path, config.image_size, cast(Channels | None, config.channels), config.seed)
    elif path.suffix == ".npz":
        loaded = read_npz(path)
    else:
        problem = "it is neither a folder of images nor an .npz file" if path.exists() else "there is no such file"
        raise DataError(path, problem, "Give a folder of images or an .npz file as --data")
    if config.augment is not None and len(loaded.shape) != 3:
        raise ValueError(f"--augment is for images (N, C, H, W): {path} has entries of shape {loaded.shape}")
    if config.gate == "valid" and len(loaded.train) < 2:
        raise DataError(path, "it has only one training example", "Give more")
    loaded = hold_out(config, loaded)
    if len(loaded.train) % config.batch_size == 1 and len(loaded.train) > 1:
        loaded = loaded.take(len(loaded.train) - 1, seed=None)  # batch norm cannot train on a batch of one
    if config.classes and (config.classes, config.images) != (loaded.classes, _counts(loaded)):
        problem = "its classes or the number of its images changed since the run was started"
        raise DataError(path, problem, "Start a new run")
    return loaded.to(config.device)


def _counts(loaded: Dataset) -> tuple[int, int]:
    return len(loaded.train), len(loaded.test)


def make_own_recipe(config: FitConfig, loaded: Dataset) -> Recipe:
    """The parts that a config asks for; the model has been checked against the data.

    Raises:
        ValueError: They do not fit.
    """
    builder = find_builder(config.model, config.import_from)

    def build_model() -> nn.Module:
        torch.manual_seed(config.seed)
        return builder().to(config.device)

    model = build_model()
    layout = find_layout(model, loaded, config.experiment)
    lr = _default_rate(config, model) if config.lr is None else config.lr

    scaling = find_standardisation(model, loaded) if config.standardise else None

    def prepare(model: nn.Module) -> None:
        if config.weights is not None:
            load_weights(model, Path(config.weights))
            if scaling is not None:
                scaling.take_out(model)

    recipe = build_recipe(
        replace(config, lr=lr, classes=loaded.classes, images=_counts(loaded)),
        title={"preset": "own"},
        data=loaded if scaling is None else scaling.scaled(loaded),
        layout=layout,
        lr=lr,
        build_model=build_model,
        prepare=prepare,
        delivered=(lambda model: model) if scaling is None else scaling.for_unscaled,
    )
    if config.weights is None:
        return recipe
    prepare(model)  # also: weights that do not fit are found before anything is written
    given = evaluate(model, recipe.evaluation_batches(recipe.data.test), recipe.loss)
    return replace(recipe, title={**recipe.title, "given_accuracy": given.accuracy})


def _default_rate(config: FitConfig, model: nn.Module) -> float:
    rate = LEARNING_RATES[config.optimizer][config.weights is not None]
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return min(rate, BATCH_NORM_RATE) if config.optimizer == "rls" and normed else rate
