"""An experiment's run: its data and its recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from rlsprune.app import data
from rlsprune.app.config.base import HELD_OUT_SHARE
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.data.datasets import Dataset, stratified_choice
from rlsprune.app.experiments.methods import build_method, build_model, take_shape
from rlsprune.app.experiments.registry import experiment
from rlsprune.app.run.build import build_recipe, hold_out
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.recipe import Recipe

__all__ = ["load_data", "make_recipe", "run"]


def run(config: RunConfig, folder: RunFolder, observer: Observer | None = None) -> dict[str, Any]:
    """Trains and prunes as the config says; resumes from the folder's last checkpoint if there is one.

    Args:
        config: The run's configuration.
        folder: The folder of its files.
        observer: Observer of the run.

    Returns:
        The summary that the folder's summary.json holds.
    """
    # The data are loaded before anything is written, so that missing data leave no folder behind.
    return train_and_prune(make_recipe(config, load_data(config)), folder, observer)


def load_data(config: RunConfig) -> Dataset:
    """Loads the experiment's data set into memory on the run's device, cut and split as the config says."""
    loaded = data.load(experiment(config.experiment).dataset, config.data_dir, config.verify)
    if config.test_on == "held-out":
        apart = loaded.hold_out(max(1, round(HELD_OUT_SHARE * len(loaded.train))), seed=1)
        assert apart.valid is not None
        loaded = replace(apart, test=apart.valid, valid=None)
    if config.train_images is not None and config.train_images < len(loaded.train):
        loaded = loaded.take(config.train_images)
    if config.test_images is not None and config.test_images < len(loaded.test):
        chosen = stratified_choice(loaded.test.labels, config.test_images, seed=0)
        loaded = replace(loaded, test=loaded.test.select(chosen))
    return hold_out(config, loaded).to(config.device)


def make_recipe(config: RunConfig, loaded: Dataset) -> Recipe:
    """Builds the recipe that a config asks for."""

    def prepare(model: nn.Module) -> None:
        if config.shape_from is not None:
            take_shape(model, RunFolder(config.shape_from))

    return build_recipe(
        config,
        title={"preset": config.preset},
        data=loaded,
        layout="channels-last" if experiment(config.experiment).convolutional else "flat",
        lr=config.rate,
        build_model=lambda: build_model(config),
        prepare=prepare,
        method=partial(build_method, config),
    )
