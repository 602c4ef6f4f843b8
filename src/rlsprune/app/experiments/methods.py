"""The network of an experiment's run and its pruning method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, RandomChoice, SoftPruning, WeightLevel
from rlsprune.app.baselines.common import OneShot
from rlsprune.app.baselines.zeroing import ratio_at
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.registry import BASELINES, ZEROING, experiment
from rlsprune.app.run import build
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Method
from rlsprune.io import modelfile

__all__ = ["build_method", "build_model", "take_shape"]


def build_model(config: RunConfig) -> nn.Module:
    """Builds the experiment's network at full size, initialised from the config's seed."""
    chosen = experiment(config.experiment)
    torch.manual_seed(config.seed)
    model = chosen.build(batch_norm=config.method == "net-slimming").to(config.device)
    if chosen.convolutional:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_method(config: RunConfig, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> Method:
    """Builds the pruning method: a rival with the experiment's ratio, or a method that is not tied to experiments."""
    if config.method not in BASELINES:
        return build.build_method(config, model, optimizer, example_inputs)
    chosen, when, asked = experiment(config.experiment), config.prune_epoch, config.rival_ratio
    if config.method in ZEROING:
        own = {"soft-pruning": chosen.soft_ratio, "weight-level": chosen.weight_ratio}[config.method]
        ratio = asked or (own if config.rival_target is None else ratio_at(model, config.rival_target))
        if config.method == "soft-pruning":
            return SoftPruning(model, example_inputs, ratio=ratio)
        rival: OneShot = WeightLevel(model, example_inputs, ratio=ratio, prune_epoch=when)
    else:
        rivals: dict[str, Callable[..., OneShot]] = {
            "l1-norm": L1Norm,
            "net-slimming": NetSlimming,
            "depgraph": DepGraph,
            "random": partial(RandomChoice, seed=config.seed),
        }
        rival = rivals[config.method](
            model,
            optimizer,
            example_inputs,
            ratio=asked or chosen.structured_ratio,
            prune_epoch=when,
            target=None if config.rival_target is None else {config.rival_target_of: config.rival_target},
            inverse=chosen.pruning.inverse,
        )
    rival.prune_share = config.prune_share
    return rival


def take_shape(model: nn.Module, folder: RunFolder) -> None:
    """Gives a fresh network the shape of a finished run's network, and reinitialises it from torch's random state.

    The input features that the run kept are part of the shape.
    """
    modelfile.load(folder.model, into=model)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)  # also resets the statistics of a batch norm
        if reset is not None:
            reset()
