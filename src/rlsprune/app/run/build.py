"""Builds the parts of a run from its config, for experiments and for a user's own network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rlsprune.app.config.base import BaseConfig
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.data.datasets import Dataset
from rlsprune.app.run.method import Method
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.app.run.recipe import Layout, Recipe
from rlsprune.app.run.scores import Scoring
from rlsprune.app.run.unpruned import NoPruning
from rlsprune.optim.rls import RLS
from rlsprune.training.loop import Loss

__all__ = ["build_method", "build_optimizer", "build_recipe", "hold_out"]


def hold_out(config: BaseConfig, data: Dataset) -> Dataset:
    """Holds images out of the training split if the gate uses them."""
    return data.hold_out(max(1, round(config.held_out_share * len(data.train)))) if config.gate == "valid" else data


def build_optimizer(config: BaseConfig, model: nn.Module, lr: float) -> Optimizer:
    """Builds RLS with the config's settings, momentum SGD with the paper's settings, or AdamW."""
    if config.optimizer == "rls":
        training = config.training
        return RLS(model, lr=lr, fallback_lr=min(0.1, lr), mean_scale=training.mean_scale, rank=training.rank)
    if config.optimizer == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    return AdamW(model.parameters(), lr=lr)


def build_method(config: BaseConfig, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> Method:
    """Builds our own pruning method, or none."""
    if config.pruning is None or config.method == "none":
        return NoPruning(model, example_inputs)
    epochs = config.epochs if config.cpu_seconds is None else None
    return RLSPruning(model, optimizer, example_inputs, config.pruning, epochs, config.warmup_epochs)


def build_recipe(
    config: BaseConfig,
    *,
    title: Mapping[str, Any],
    data: Dataset,
    layout: Layout,
    lr: float,
    build_model: Callable[[], nn.Module],
    prepare: Callable[[nn.Module], object],
    delivered: Callable[[nn.Module], nn.Module] = lambda model: model,
    method: Callable[[nn.Module, Optimizer, Tensor], Method] | None = None,
    loss: Loss | None = None,
    scoring: Scoring | None = None,
) -> Recipe:
    """Builds the recipe of a run from its config and from parts that only its command knows.

    Args:
        config: The run's configuration.
        title: Entries of the summary beside those of the config.
        data: See `Recipe`.
        layout: See `Recipe`.
        lr: The optimizer's learning rate.
        build_model: See `Recipe`.
        prepare: See `Recipe`.
        delivered: See `Recipe`.
        method: Function that builds the method; None for `build_method`.
        loss: The loss; None for the one that the config names.
        scoring: See `Recipe`; None for accuracy.
    """
    return Recipe(
        config=config.to_dict(),
        title={name: getattr(config, name) for name in ("experiment", "method", "optimizer", "seed")} | dict(title),
        data=data,
        layout=layout,
        build_model=build_model,
        prepare=prepare,
        delivered=delivered,
        build_optimizer=lambda model: build_optimizer(config, model, lr),
        build_method=method or partial(build_method, config),
        loss=loss or LOSSES[str(config.loss)],
        scoring=scoring or Scoring(),
        gate=config.gate,
        epochs=config.epochs,
        cpu_seconds=config.cpu_seconds,
        batch_size=config.batch_size,
        seed=config.seed,
        threads=config.threads,
        augment=config.augment,
        training=config.training,
        on_fault=config.on_fault,
        deterministic=config.deterministic,
        bfloat16=config.bfloat16,
    )
