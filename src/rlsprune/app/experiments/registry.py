"""The experiments by name: data, network, and how long to train. Light to import: no torch."""

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
"""Those that set weights to zero and leave the FLOPs as they are."""
METHODS = ("rls", "rls-paper", *BASELINES, "scratch", "none")
PRESETS = ("short", "paper")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How much to train."""

    epochs: int
    small_epochs: int | None = None
    """Those of the recipe "ours": the epochs of `rls` are cheap once its network is small. None for as many."""
    warmup_epochs: int
    """q: epochs before the first prune."""
    small_warmup_epochs: int | None = None
    """The value of the recipe "ours"; None for the same."""
    train_images: int | None = None
    """None for all."""
    test_images: int | None = None
    """None for all."""
    batch_size: int = 128
    """M"""
    augmentation: str
    """What augmenting means here, as `parse_augmentation` reads it: digits are not mirrored."""
    augment: bool = False
    """Whether the recipe "paper" has it too; "ours" always has."""

    def length(self, ours: bool) -> tuple[int, int]:
        """Epochs and q: those of the recipe "ours", or of "paper"."""
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
    """What l1-norm, net slimming, DepGraph and random choice remove of each hidden layer."""
    weight_ratio: float
    """What weight-level pruning zeroes out."""
    soft_ratio: float
    """What soft pruning zeroes out in every epoch."""
    presets: Mapping[str, Preset]
    training: TrainingSettings
    """The settings of the recipe "ours"."""
    pruning: PruningSettings
    """The settings of `rls`."""
    loss: str = "mse"
    rate: float = 1.0
    """η of RLS: lower with batch norm."""

    @property
    def convolutional(self) -> bool:
        """Whether the network takes images as they are."""
        return self.network != "fnn"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, as the network takes it."""
        return (3, 32, 32) if self.convolutional else (784,)

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A fresh network, initialised from torch's random state."""
        from rlsprune.app.models import FNN, MiniVGG, ResNet

        if self.network == "resnet20":
            return ResNet(20)  # which has its batch norms anyway
        return MiniVGG(batch_norm=batch_norm) if self.network == "mini-vgg" else FNN(batch_norm=batch_norm)


def _short_convolutional(augmentation: str) -> Preset:
    # In the few hundred steps that batches of 128 would make of so few images, momentum SGD does not even leave its
    # first plateau, and there would be nothing to compare.
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
        # With a P that starts anew at a prune, and a small k, what is left learns as fast as at first.
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
        training=replace(_TRAINING, lr_decay=0.85),  # at η = 1 to the middle of a long run the loss would rise again
        pruning=replace(OURS, ratio=0.4, target=0.06, allocate=True),
    )


_DIGITS = Preset(epochs=40, warmup_epochs=3, augmentation="crop1")
# In 28 epochs, the first two of the whole network, `rls` takes about as long as in 20 of which the first four are.
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
    """Looks an experiment up.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
