"""The network of an experiment's run, its learning rate and its pruning method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.app.config.base import LEARNING_RATES
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.registry import BASELINES, experiment
from rlsprune.app.run import build
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Method
from rlsprune.io import modelfile

__all__ = ["build_method", "build_model", "learning_rate", "take_shape"]


def build_model(config: RunConfig) -> nn.Module:
    """The experiment's network at full size, freshly initialised from the config's seed."""
    chosen = experiment(config.experiment)
    torch.manual_seed(config.seed)
    model = chosen.build(batch_norm=config.method == "net-slimming").to(config.device)
    if chosen.convolutional:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def learning_rate(config: RunConfig) -> float:
    """The experiment's for RLS (lower with batch norm); for the others what suits training from scratch."""
    return experiment(config.experiment).rate if config.optimizer == "rls" else LEARNING_RATES[config.optimizer][0]


def build_method(config: RunConfig, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> Method:
    """What prunes: one of the rivals, with the experiment's ratio, or what any run may have."""
    if config.method not in BASELINES:
        return build.build_method(config, model, optimizer, example_inputs)
    chosen, when, asked = experiment(config.experiment), config.prune_epoch, config.rival_ratio
    if config.method == "soft-pruning":
        return SoftPruning(model, example_inputs, ratio=asked or chosen.soft_ratio)
    if config.method == "weight-level":
        return WeightLevel(model, example_inputs, ratio=asked or chosen.weight_ratio, prune_epoch=when)
    rivals: dict[str, Callable[..., Method]] = {"l1-norm": L1Norm, "net-slimming": NetSlimming, "depgraph": DepGraph}
    structured = rivals[config.method]
    return structured(model, optimizer, example_inputs, ratio=asked or chosen.structured_ratio, prune_epoch=when)


def take_shape(model: nn.Module, folder: RunFolder) -> None:
    """Gives a fresh network the shape of a finished run's, initialised anew from torch's random state.

    The input features that the run had kept are part of its shape.
    """
    modelfile.load(folder.model, into=model)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)  # of a batch norm its statistics too
        if reset is not None:
            reset()
