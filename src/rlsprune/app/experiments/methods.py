"""From a run's config to its network, optimizer and pruning method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.registry import experiment
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Method
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.app.run.unpruned import NoPruning
from rlsprune.io import modelfile
from rlsprune.optim.rls import RLS

__all__ = ["build_method", "build_model", "build_optimizer", "take_shape"]


def build_model(config: RunConfig) -> nn.Module:
    """The experiment's network at full size, freshly initialised from the config's seed."""
    chosen = experiment(config.experiment)
    torch.manual_seed(config.seed)
    model = chosen.build(batch_norm=config.method == "net-slimming").to(config.device)
    if chosen.convolutional:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """RLS as the config says (with batch norm a lower η), momentum SGD with the paper's settings, or AdamW."""
    if config.optimizer == "rls":
        training = config.training
        return RLS(model, lr=experiment(config.experiment).rate, mean_scale=training.mean_scale, rank=training.rank)
    if config.optimizer == "sgd":
        return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return AdamW(model.parameters(), lr=1e-3)


def build_method(config: RunConfig, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> Method:
    """What prunes."""
    if config.pruning is not None:
        return RLSPruning(model, optimizer, example_inputs, config.pruning, config.epochs, config.warmup_epochs)
    if config.method in ("none", "scratch"):
        return NoPruning(model, example_inputs)
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
