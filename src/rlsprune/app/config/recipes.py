"""How a network is trained, whatever prunes it: as in the paper, or as we do. Light to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlsprune.app.config.base import BATCH_NORM_RATE, LEARNING_RATES, OPTIMIZERS, check_choice
from rlsprune.app.config.settings import TrainingSettings
from rlsprune.app.experiments.registry import BASELINES, Experiment, experiment

__all__ = ["RECIPES", "TrainingRecipe", "find_recipe", "optimizer_of", "rate_of", "recipe_of", "settings_of"]

RECIPES = ("paper", "ours")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Images, loss, schedule and length of a training."""

    name: str
    augment: str | None
    """What is done to the images, as `parse_augmentation` reads it."""
    loss: str
    epochs: int
    warmup_epochs: int
    """q: epochs before the first prune."""
    training: TrainingSettings
    """The fall of the rate, the average of the weights, and P."""


def find_recipe(name: str, chosen: Experiment, preset: str) -> TrainingRecipe:
    """A recipe, as it stands for an experiment and a preset."""
    check_choice("recipe", name, RECIPES)
    amount = chosen.presets[preset]
    ours = name == "ours"
    epochs, warmup_epochs = amount.length(ours)
    return TrainingRecipe(
        name=name,
        augment=amount.augmentation if ours or amount.augment else None,
        loss=chosen.loss,
        epochs=epochs,
        warmup_epochs=warmup_epochs,
        training=chosen.training if ours else TrainingSettings(),
    )


def recipe_of(method: str) -> str:
    """The recipe that a method is trained with unless another is asked for."""
    return "ours" if method in ("rls", "scratch") else "paper"


def optimizer_of(method: str, asked: str | None) -> str:
    """The optimizer asked for, or the one that a method has in the paper.

    Raises:
        ValueError: The method cannot do with it.
    """
    optimizer = asked or ("sgd" if method in BASELINES else "rls")
    check_choice("optimizer", optimizer, OPTIMIZERS)
    if method == "rls-paper" and optimizer != "rls":
        raise ValueError(f"--optimizer {optimizer}: rls-paper prunes by the P of RLS; leave it out, or use rls")
    return optimizer


def rate_of(name: str, method: str, optimizer: str) -> float:
    """The learning rate of an experiment's run unless another is asked for; lower for RLS with batch norm."""
    if optimizer != "rls":
        return LEARNING_RATES[optimizer][0]
    rate = experiment(name).rate
    return min(rate, BATCH_NORM_RATE) if method == "net-slimming" else rate


def settings_of(recipe: TrainingRecipe, method: str) -> TrainingSettings:
    """A recipe's settings for a method: the paper's own prunes by P whole."""
    return replace(recipe.training, rank=None) if method == "rls-paper" else recipe.training
