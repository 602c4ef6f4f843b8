"""The experiments by name: data, network, and how long to train. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BASELINES", "EXPERIMENTS", "METHODS", "OPTIMIZERS", "PRESETS", "Experiment", "Preset", "experiment"]

BASELINES = ("l1-norm", "net-slimming", "soft-pruning", "weight-level", "depgraph")
METHODS = ("rls", "rls-paper", *BASELINES, "scratch", "none")
OPTIMIZERS = ("rls", "sgd", "adamw")
PRESETS = ("short", "paper")


@dataclass(frozen=True)
class Preset:
    """How much to train."""

    epochs: int
    warmup_epochs: int
    """q: epochs before the first prune."""
    train_images: int | None = None
    """None for all."""
    test_images: int | None = None
    """None for all."""
    augment: Literal["crop", "crop+flip"] | None = None


@dataclass(frozen=True)
class Experiment:
    """A data set, a network and the rivals' pruning ratios on it."""

    name: str
    title: str
    dataset: str
    network: Literal["fnn", "mini-vgg"]
    table: int | None
    """The number of the paper's table."""
    structured_ratio: float
    """What l1-norm, net slimming and DepGraph remove of each hidden layer."""
    weight_ratio: float
    """What weight-level pruning zeroes out."""
    soft_ratio: float
    """What soft pruning zeroes out in every epoch."""
    presets: Mapping[str, Preset]

    @property
    def convolutional(self) -> bool:
        """Whether the network takes images as they are."""
        return self.network == "mini-vgg"

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A fresh network, initialised from torch's random state."""
        from rlsprune.models import FNN, MiniVGG

        return MiniVGG(batch_norm=batch_norm) if self.convolutional else FNN(batch_norm=batch_norm)


def _fnn(name: str, title: str, dataset: str, table: int | None, short: Preset) -> Experiment:
    return Experiment(name, title, dataset, "fnn", table, 0.7, 0.7, 0.3, {"short": short, "paper": Preset(200, 30)})


def _vgg(name: str, title: str, dataset: str, table: int, paper: Preset) -> Experiment:
    short = Preset(10, 3, train_images=5000, test_images=2000)
    return Experiment(name, title, dataset, "mini-vgg", table, 0.5, 0.5, 0.3, {"short": short, "paper": paper})


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        _fnn("digits-fnn", "FNN on the embedded digits", "digits", 1, Preset(40, 3)),
        _fnn("mnist-fnn", "FNN on MNIST", "mnist", 1, Preset(20, 3)),
        _vgg("cifar10-vgg", "mini-VGG on CIFAR-10", "cifar10", 2, Preset(200, 30, augment="crop+flip")),
        _vgg("svhn-vgg", "mini-VGG on SVHN", "svhn", 3, Preset(200, 30)),
    )
}


def experiment(name: str) -> Experiment:
    """Looks an experiment up.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
