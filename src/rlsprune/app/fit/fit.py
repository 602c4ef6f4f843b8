"""The run of a user's own network, and the files that it delivers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rlsprune.app.config.base import BATCH_NORM_RATE, LEARNING_RATES
from rlsprune.app.config.fit import FitConfig, names_function
from rlsprune.app.config.metrics import find_metrics, metric_of
from rlsprune.app.data.arrays import read_npz
from rlsprune.app.data.datasets import Dataset
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.folders import Channels, read_image_folder
from rlsprune.app.data.objects import read_objects
from rlsprune.app.data.tables import read_table, table_parts
from rlsprune.app.fit.bundle import INT8, ONNX, PREDICT, is_written, with_digests, write_int8, write_onnx
from rlsprune.app.fit.limit import limited
from rlsprune.app.fit.model import find_builder, find_function, find_layout, load_weights
from rlsprune.app.fit.standardise import find_standardisation
from rlsprune.app.fit.targets import TargetScale, find_target_scale
from rlsprune.app.fit.task import check_scorable, find_loss
from rlsprune.app.run.build import build_recipe, hold_out
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.recipe import Recipe
from rlsprune.app.run.scores import Scoring
from rlsprune.distributed.torchrun import leads
from rlsprune.io import modelfile

__all__ = ["ONNX_PACKAGES", "fit", "load_own_data", "make_own_recipe", "missing_onnx_packages"]

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def fit(
    config: FitConfig,
    folder: RunFolder,
    observer: Observer | None = None,
    baseline_observer: Callable[[], Observer] = Observer,
) -> dict[str, Any]:
    """Trains and prunes as the config says, or resumes the run, and writes the model and the files that deploy it.

    The ONNX file is left out where its packages are not installed (`missing_onnx_packages`).

    Args:
        config: The run's configuration.
        folder: The folder of its files.
        observer: Observer of the run.
        baseline_observer: Function that makes the observer of the unpruned network, if the config asks for one.

    Returns:
        The summary that the folder's summary.json holds.

    Raises:
        ValueError: Model, data and weights do not fit each other. Nothing has been written then.
        ExportError: The network cannot be exported; everything else has been written.
    """
    loaded = load_own_data(config)
    recipe = make_own_recipe(config, loaded)
    summary = folder.read_summary() if folder.finished else train_and_prune(recipe, folder, observer)
    if config.baseline and f"unpruned_{metric_of(summary).name}" not in summary:
        twin, beside = config.unpruned(), type(folder)(folder.path / "unpruned")
        unpruned = (
            beside.read_summary()
            if beside.finished
            else train_and_prune(make_own_recipe(twin, load_own_data(twin)), beside, baseline_observer())
        )
        names = [metric.name for metric in recipe.scoring.metrics]
        summary = {**summary, **{f"unpruned_{name}": unpruned[name] for name in names}}
        with folder.locked():
            folder.write_json("summary", summary)
    if config.method == "shrink" and config.weights is None and f"unpruned_{metric_of(summary).name}" not in summary:
        name = metric_of(summary).name
        before = [event[f"{name}_before"] for event in folder.read_lines("events")] or [summary[name]]
        with folder.locked():
            summary = {**summary, f"unpruned_{name}": before[0]}
            folder.write_json("summary", summary)
    if not leads() or missing_onnx_packages():
        return summary
    if not is_written(summary, folder.path, ONNX, PREDICT):
        model = modelfile.load(folder.model, into=recipe.build_model())
        with folder.locked():
            write_onnx(model, recipe, loaded, folder.path)
            summary = with_digests(summary, folder.path, ONNX, PREDICT)
            folder.write_json("summary", summary)
    if config.int8 and not is_written(summary, folder.path, INT8):
        with folder.locked():
            scores = write_int8(recipe, loaded, folder.path)
            summary = with_digests({**summary, **scores}, folder.path, INT8)
            folder.write_json("summary", summary)
    return summary


def missing_onnx_packages() -> list[str]:
    """Returns the packages that writing an ONNX file needs and that are not installed."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]


def load_own_data(config: FitConfig) -> Dataset:
    """Reads the data into memory on the run's device, and holds examples out if the run needs them.

    Raises:
        DataError: The data are missing, damaged, or not those with which the run was started.
    """
    path = Path(config.data)
    if names_function(config.data):
        loaded = read_objects(config.data, find_function(config.data, config.import_from), config.task, config.seed)
    elif table_parts(path):
        loaded = read_table(path, config.label, config.drop_columns, config.task, config.seed)
    elif config.label or config.drop_columns:
        raise ValueError(
            f"--label and --drop-columns are for tables of named columns, and {path} is not one: leave them out"
        )
    elif path.is_dir():
        loaded = read_image_folder(path, config.image_size, cast(Channels | None, config.channels), config.seed)
    elif path.suffix == ".npz":
        loaded = read_npz(path, config.task)
    else:
        problem = "it is neither a folder of images nor a table" if path.exists() else "there is no such file"
        raise DataError(path, problem, "Give a folder of images, a .csv, .parquet or .npz file as --data")
    if config.task not in (None, loaded.task):
        raise ValueError(f"--task {config.task}: {path} holds images of classes; leave --task out")
    if config.augment is not None and len(loaded.shape) != 3:
        raise ValueError(f"--augment is for images (N, C, H, W): {path} has entries of shape {loaded.shape}")
    if config.gate == "valid" and len(loaded.train) < 2:
        raise DataError(path, "it has only one training example", "Give more")
    features = config.pruning.features
    if features is not None and features > math.prod(loaded.shape):
        raise ValueError(f"--features {features}: {path} has only {math.prod(loaded.shape)}; give at most as many")
    loaded = hold_out(config, loaded)
    if len(loaded.train) % config.batch_size == 1 and len(loaded.train) > 1:
        loaded = loaded.take(len(loaded.train) - 1, seed=None)  # batch norm cannot train on a batch of one
    known = (config.classes, config.columns, config.images)
    if config.classes and known != (loaded.classes, loaded.columns, _counts(loaded)):
        problem = "its classes, its columns or the number of its examples changed since the run was started"
        raise DataError(path, problem, "Start a new run")
    return loaded.to(config.device)


def _counts(loaded: Dataset) -> tuple[int, int]:
    return len(loaded.train), len(loaded.test)


def make_own_recipe(config: FitConfig, loaded: Dataset) -> Recipe:
    """Builds the recipe that a config asks for, and checks the model against the data.

    Raises:
        ValueError: Model, data and weights do not fit each other.
    """
    builder = find_builder(config.model, config.import_from)

    def build_model() -> nn.Module:
        torch.manual_seed(config.seed)
        return builder().to(config.device)

    model = build_model()
    layout = find_layout(model, loaded, config.experiment)
    lr = _default_rate(config, model) if config.lr is None else config.lr

    metrics = find_metrics(loaded.task, config.metric)
    check_scorable(metrics, loaded, loaded.test, "the test examples")
    loss_name, loss = find_loss(config, loaded)
    found = (find_standardisation(model, loaded), find_target_scale(model, loaded)) if config.standardise else ()
    scalings = [scaling for scaling in found if scaling is not None]
    data, scoring = loaded, Scoring(loaded.task, metrics)
    for scaling in scalings:
        data = scaling.scaled(data)
        if isinstance(scaling, TargetScale):
            scoring = replace(scoring, in_users_unit=scaling.scaling.unscaled)

    def prepare(model: nn.Module) -> None:
        if config.weights is not None:
            load_weights(model, Path(config.weights))
            for scaling in scalings:
                scaling.take_out(model)

    def delivered(model: nn.Module) -> nn.Module:
        for scaling in scalings:
            model = scaling.for_unscaled(model)
        return model

    recipe = build_recipe(
        replace(
            config,
            lr=lr,
            task=loaded.task,
            metric=metrics[0].name,
            loss=loss_name,
            classes=loaded.classes,
            columns=loaded.columns,
            images=_counts(loaded),
        ),
        title={"preset": "own"},
        data=data,
        layout=layout,
        lr=lr,
        build_model=build_model,
        prepare=prepare,
        delivered=delivered,
        loss=loss,
        scoring=scoring,
    )
    if config.max_drop is not None:
        assert data.valid is not None
        check_scorable(metrics, loaded, data.valid, "the held-out examples")
        recipe = limited(config, recipe)
    if config.weights is None:
        return recipe
    prepare(model)  # also finds weights that do not fit before anything is written
    given = scoring(model, recipe.evaluation_batches(recipe.data.test), loss).scores
    return replace(recipe, title={**recipe.title, **{f"given_{name}": score for name, score in given.items()}})


def _default_rate(config: FitConfig, model: nn.Module) -> float:
    rate = LEARNING_RATES[config.optimizer][config.weights is not None]
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return min(rate, BATCH_NORM_RATE) if config.optimizer == "rls" and normed else rate
