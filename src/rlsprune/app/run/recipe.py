"""The parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.config.settings import TrainingSettings
from rlsprune.app.data.batches import Batches
from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.run.method import Method
from rlsprune.app.run.scores import Scoring
from rlsprune.training.loop import Loss

__all__ = ["Layout", "Recipe"]

Layout = Literal["plain", "channels-last", "flat"]
"""The form of a network's inputs: their own shape, images in that memory format, or flat features."""

_EVALUATION_BATCH = 500  # images; the paper's convolution maps then take 130 MB


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """The parts of a run, from an experiment of the paper or from a user with their own network.

    The functions are called in the order in which they stand here, when the run starts or is resumed.
    """

    config: Mapping[str, Any]
    """The contents of config.json."""
    title: Mapping[str, Any]
    """The first entries of the summary."""
    data: Dataset
    """The data on the device, with `valid` if the gate is "valid"."""
    layout: Layout
    build_model: Callable[[], nn.Module]
    """Function that builds a fresh network at full size on the device, the reference of all percentages."""
    prepare: Callable[[nn.Module], object] = lambda model: None
    """Function that gives that network weights or a shape when a run begins, not when it is resumed."""
    delivered: Callable[[nn.Module], nn.Module] = lambda model: model
    """Function from the network that is trained on these data to the one that is saved in the file."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    build_method: Callable[[nn.Module, Optimizer, Tensor], Method]
    """Function that builds the method from the network, its optimizer and an example of its input."""
    loss: Loss
    scoring: Scoring = field(default_factory=Scoring)
    """The scores that are reported on the test split."""
    gate: str
    """The loss of the gate: the epoch's mean ("train"), its last minibatch ("batch"), or held-out ("valid")."""
    epochs: int
    batch_size: int
    seed: int
    threads: int
    augment: str | None = None
    training: TrainingSettings = field(default_factory=TrainingSettings)
    on_fault: str = "raise"
    """The response to a numerical fault, one of `ON_FAULT`."""
    cpu_seconds: float | None = None
    """The processor time after which the run ends, instead of after `epochs`."""
    trains: bool = True
    """Whether epochs train; False to prune the prepared network without training."""
    deterministic: bool = False
    """Whether torch may use only algorithms that give the same numbers every time; see `deterministic`."""
    bfloat16: bool = False
    """Whether the forward passes of training run in bfloat16."""

    def training_batches(self, split: Split, generator: torch.Generator, images_per_epoch: int) -> Batches:
        """Returns batches of the training split, shuffled and augmented."""
        options = {"generator": generator, "images_per_epoch": images_per_epoch, "augment": self.augment}
        return self._batches(split, self.batch_size, **options)

    def evaluation_batches(self, split: Split) -> Batches:
        """Returns batches of a split, in its order."""
        return self._batches(split, _EVALUATION_BATCH, shuffle=False)

    def example(self, count: int = 1) -> Tensor:
        """Returns all-zero inputs in the network's layout."""
        zeros = torch.zeros(count, *self.data.shape, device=self.data.train.images.device)
        if self.layout == "channels-last":
            return zeros.to(memory_format=torch.channels_last)
        return zeros.flatten(1) if self.layout == "flat" else zeros

    def in_layout(self, model: nn.Module) -> nn.Module:
        """Puts the network's weights into the memory format of the inputs, in place."""
        if self.layout == "channels-last":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _batches(self, split: Split, batch_size: int, **options: Any) -> Batches:
        channels_last, flat = self.layout == "channels-last", self.layout == "flat"
        return Batches(split.images, split.labels, batch_size, channels_last=channels_last, flat=flat, **options)
