"""The experiments by name: data, network, and length of training. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rlsprune.app.config.settings import OURS, RANK, PruningSettings, TrainingSettings

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BASELINES", "EXPERIMENTS", "METHODS", "PRESETS", "ZEROING", "Experiment", "Preset", "experiment"]

BASELINES = ("l1-norm", "net-slimming", "soft-pruning", "weight-level", "depgraph", "random")
ZEROING = ("soft-pruning", "weight-level")
"""The baselines that set weights to zero and leave the FLOPs as they are."""
METHODS = ("rls", "rls-paper", *BASELINES, "scratch", "none")
PRESETS = ("short", "paper")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The amount of training."""

    epochs: int
    small_epochs: int | None = None
    """Epochs of the recipe "ours", which are cheap once the network of `rls` is small. None for the same number."""
    warmup_epochs: int
    """q: epochs before the first prune."""
    small_warmup_epochs: int | None = None
    """q of the recipe "ours"; None for the same."""
    train_images: int | None = None
    """Number of training images; None for all."""
    test_images: int | None = None
    """Number of test images; None for all."""
    batch_size: int = 128
    """M"""
    augmentation: str
    """The augmentation as `parse_augmentation` reads it; digits are not mirrored."""
    augment: bool = False
    """Whether the recipe "paper" augments too; "ours" always does."""

    def length(self, ours: bool) -> tuple[int, int]:
        """Returns the epochs and q of the recipe "ours" or "paper"."""
        epochs, warmup = (self.small_epochs, self.small_warmup_epochs) if ours else (None, None)
        return self.epochs if epochs is None else epochs, self.warmup_epochs if warmup is None else warmup


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A data set, a network and the rivals' pruning ratios on it."""

    name: str
    title: str
    dataset: str
    network: Literal["fnn", "mini-vgg", "resnet20"]
    table: int | None
    """The number of the paper's table."""
    structured_ratio: float
    """The share of each hidden layer that l1-norm, net slimming, DepGraph and random choice remove."""
    weight_ratio: float
    """The share of the weights that weight-level pruning zeroes out."""
    soft_ratio: float
    """The share of each layer's weights that soft pruning zeroes out in every epoch."""
    presets: Mapping[str, Preset]
    training: TrainingSettings
    """The settings of the recipe "ours"."""
    pruning: PruningSettings
    """The settings of `rls`."""
    loss: str = "mse"
    rate: float = 1.0
    """η of RLS, lower with batch norm."""

    @property
    def convolutional(self) -> bool:
        """Returns whether the network takes images as they are."""
        return self.network != "fnn"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Returns the shape of one input of the network."""
        return (3, 32, 32) if self.convolutional else (784,)

    def build(self, batch_norm: bool = False) -> nn.Module:
        """Builds a fresh network, initialised from torch's random state."""
        from rlsprune.app.models import FNN, MiniVGG, ResNet

        if self.network == "resnet20":
            return ResNet(20)  # it always has batch norms
        return MiniVGG(batch_norm=batch_norm) if self.network == "mini-vgg" else FNN(batch_norm=batch_norm)


def _short_convolutional(augmentation: str) -> Preset:
    # With batches of 128, so few images make only a few hundred steps, in which momentum SGD does not leave its first
    # plateau, so that there is nothing to compare.
    return Preset(
        epochs=10,
        small_epochs=24,  # about the time of ten epochs of the unpruned network
        warmup_epochs=3,
        train_images=5000,
        test_images=2000,
        batch_size=32,
        augmentation=augmentation,
    )


def _paper(augmentation: str, augment: bool = False) -> Preset:
    return Preset(epochs=200, warmup_epochs=30, augmentation=augmentation, augment=augment)


_TRAINING = TrainingSettings(lr_decay=0.4, average=1.0, rank=RANK)


def _fnn(name: str, title: str, dataset: str, short: Preset) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        dataset=dataset,
        network="fnn",
        table=1,
        structured_ratio=0.7,
        weight_ratio=0.7,
        soft_ratio=0.3,
        presets={"short": short, "paper": _paper("crop1")},
        # With a P that is reset at a prune, and a small k, the smaller network learns as fast as at first.
        training=replace(_TRAINING, mean_scale=0.01),
        pruning=replace(OURS, ratio=0.4, inverse="reset"),
    )


def _vgg(name: str, title: str, dataset: str, table: int, presets: Mapping[str, Preset]) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        dataset=dataset,
        network="mini-vgg",
        table=table,
        structured_ratio=0.5,
        weight_ratio=0.5,
        soft_ratio=0.3,
        presets=presets,
        training=replace(_TRAINING, lr_decay=0.85),  # with η = 1 up to the middle of a long run the loss rises again
        pruning=replace(OURS, target=0.06, allocate=True),
    )


_DIGITS = Preset(epochs=40, warmup_epochs=3, augmentation="crop1")
# 28 epochs of `rls`, the first two with the whole network, take about as long as 20 epochs with four such epochs.
_MNIST = Preset(epochs=20, small_epochs=28, warmup_epochs=3, small_warmup_epochs=1, augmentation="crop1")
_CIFAR10 = {"short": _short_convolutional("crop2+flip"), "paper": _paper("crop+flip", augment=True)}
_SVHN = {"short": _short_convolutional("crop2"), "paper": _paper("crop")}

_RESNET = Experiment(
    name="cifar10-resnet20",
    title="ResNet-20 on CIFAR-10",
    dataset="cifar10",
    network="resnet20",
    table=None,
    structured_ratio=0.5,
    weight_ratio=0.5,
    soft_ratio=0.3,
    presets={name: replace(preset, small_epochs=None) for name, preset in _CIFAR10.items()},
    training=_TRAINING,
    pruning=replace(OURS, target=0.25, allocate=True),  # where the rivals end with half of every layer
    loss="cross-entropy",
    rate=0.1,
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        _fnn("digits-fnn", "FNN on the embedded digits", "digits", _DIGITS),
        _fnn("mnist-fnn", "FNN on MNIST", "mnist", _MNIST),
        _vgg("cifar10-vgg", "mini-VGG on CIFAR-10", "cifar10", 2, _CIFAR10),
        _vgg("svhn-vgg", "mini-VGG on SVHN", "svhn", 3, _SVHN),
        _RESNET,
    )
}


def experiment(name: str) -> Experiment:
    """Looks up an experiment.

    Raises:
        ValueError: There is no experiment of that name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
