"""From a run's config to its network, optimizer and pruning method."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rlsprune import io
from rlsprune.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.experiments.config import PruningSettings, RunConfig
from rlsprune.experiments.registry import experiment
from rlsprune.optim.rls import RLS
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.pruner import Pruner
from rlsprune.train.folder import RunFolder
from rlsprune.train.method import Method
from rlsprune.train.unpruned import NoPruning

__all__ = ["RLSPruning", "build_method", "build_model", "build_optimizer", "take_shape"]


class RLSPruning(NoPruning):
    """`rlsprune.Pruner` with an experiment's settings, left in peace towards the end of the run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        config: RunConfig,
        pruning: PruningSettings,
    ) -> None:
        super().__init__(model, example_inputs)
        self._reunite = pruning.reunite
        # However short the run, it prunes once.
        self._last_prune = max(config.warmup_epochs + 1, config.epochs - math.ceil(config.epochs * pruning.settle))
        self.pruner = Pruner(
            model,
            optimizer,
            example_inputs,
            ratio=pruning.ratio,
            warmup_epochs=config.warmup_epochs,
            criterion=pruning.criterion,
            compensate=pruning.compensate,
            inverse=pruning.inverse,
            statistics=pruning.statistics,
            patience=pruning.patience,
            target=None if pruning.target is None else {"params": pruning.target},
            tolerance=pruning.tolerance,
        )

    @property
    def settled(self) -> bool:
        """Whether pruning has ended with a network that recovered."""
        return self._reunite and self.pruner.done and self.pruner.recovered

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Prunes if the gate is open, or rolls back if it stayed shut for too long."""
        seen = len(self.pruner.history)
        if epoch > self._last_prune:
            self.pruner.done = True  # steps still tell it whether the network has recovered
        self.pruner.step(loss)
        return self._newest(seen)

    def finish(self) -> PruneEvent | None:
        """Goes back to the last network that had recovered, if this one has not."""
        seen = len(self.pruner.history)
        self.pruner.finish()
        return self._newest(seen)

    def state_dict(self) -> dict[str, Any]:
        """The pruner's."""
        return self.pruner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The pruner's."""
        self.pruner.load_state_dict(state)

    def _newest(self, seen: int) -> PruneEvent | None:
        return self.pruner.history[-1] if len(self.pruner.history) > seen else None


def build_model(config: RunConfig) -> nn.Module:
    """The experiment's network at full size, freshly initialised from the config's seed."""
    chosen = experiment(config.experiment)
    torch.manual_seed(config.seed)
    model = chosen.build(batch_norm=config.method == "net-slimming").to(config.device)
    if chosen.convolutional:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """RLS with the paper's settings, the rivals' momentum SGD with the paper's settings, or AdamW."""
    if config.optimizer == "rls":
        return RLS(model)
    if config.optimizer == "sgd":
        return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return AdamW(model.parameters(), lr=1e-3)


def build_method(config: RunConfig, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> Method:
    """What prunes."""
    if config.pruning is not None:
        return RLSPruning(model, optimizer, example_inputs, config, config.pruning)
    if config.method in ("none", "scratch"):
        return NoPruning(model, example_inputs)
    chosen, when = experiment(config.experiment), config.prune_epoch
    if config.method == "soft-pruning":
        return SoftPruning(model, example_inputs, ratio=chosen.soft_ratio)
    if config.method == "weight-level":
        return WeightLevel(model, example_inputs, ratio=chosen.weight_ratio, prune_epoch=when)
    rivals: dict[str, Callable[..., Method]] = {"l1-norm": L1Norm, "net-slimming": NetSlimming, "depgraph": DepGraph}
    structured = rivals[config.method]
    return structured(model, optimizer, example_inputs, ratio=chosen.structured_ratio, prune_epoch=when)


def take_shape(model: nn.Module, folder: RunFolder) -> None:
    """Gives a fresh network the shape of a finished run's, initialised anew from torch's random state.

    The input features that the run had kept are part of its shape.
    """
    io.load(folder.model, into=model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
