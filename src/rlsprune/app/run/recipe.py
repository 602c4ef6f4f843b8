"""What a run is made of."""

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
"""How a network takes its inputs: in their own shape, as images in that memory format, or as flat features."""

_EVALUATION_BATCH = 500  # images; of the paper's convolution maps it makes 130 MB


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """The parts of a run, whoever chose them: an experiment of the paper, or a user with a network of their own.

    The functions are called in the order in which they stand here, when the run starts or is resumed.
    """

    config: Mapping[str, Any]
    """As it goes into config.json."""
    title: Mapping[str, Any]
    """What stands first in the summary."""
    data: Dataset
    """With `valid` if the gate is "valid", on the device."""
    layout: Layout
    build_model: Callable[[], nn.Module]
    """A fresh network at full size, on the device, of which all percentages are."""
    prepare: Callable[[nn.Module], object] = lambda model: None
    """Called with that network when a run begins, not when it is resumed: gives it weights or a shape."""
    delivered: Callable[[nn.Module], nn.Module] = lambda model: model
    """The network as it goes into the file, of the one that is trained on these data."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    build_method: Callable[[nn.Module, Optimizer, Tensor], Method]
    """From the network, its optimizer and an example of its input."""
    loss: Loss
    scoring: Scoring = field(default_factory=Scoring)
    """What is told of the network on the test split."""
    gate: str
    """The loss the method looks at: the epoch's mean ("train"), its last minibatch ("batch"), held-out ("valid")."""
    epochs: int
    batch_size: int
    seed: int
    threads: int
    augment: str | None = None
    training: TrainingSettings = field(default_factory=TrainingSettings)
    on_fault: str = "raise"
    """What to do about a numerical fault: one of `ON_FAULT`."""
    cpu_seconds: float | None = None
    """The processor time after which the run ends, instead of after `epochs`."""
    trains: bool = True
    """Whether epochs train; False to prune the network as it is prepared."""
    deterministic: bool = False
    """Whether torch may use only algorithms that give the same numbers every time; see `deterministic`."""
    bfloat16: bool = False
    """Whether the forward passes of training run in bfloat16."""

    def training_batches(self, split: Split, generator: torch.Generator, images_per_epoch: int) -> Batches:
        """Batches of the training split, shuffled and augmented."""
        options = {"generator": generator, "images_per_epoch": images_per_epoch, "augment": self.augment}
        return self._batches(split, self.batch_size, **options)

    def evaluation_batches(self, split: Split) -> Batches:
        """Batches of a split, in its order."""
        return self._batches(split, _EVALUATION_BATCH, shuffle=False)

    def example(self, count: int = 1) -> Tensor:
        """Inputs as the network takes them, all zero."""
        zeros = torch.zeros(count, *self.data.shape, device=self.data.train.images.device)
        if self.layout == "channels-last":
            return zeros.to(memory_format=torch.channels_last)
        return zeros.flatten(1) if self.layout == "flat" else zeros

    def in_layout(self, model: nn.Module) -> nn.Module:
        """The same network, its weights in the memory format of the inputs."""
        if self.layout == "channels-last":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _batches(self, split: Split, batch_size: int, **options: Any) -> Batches:
        channels_last, flat = self.layout == "channels-last", self.layout == "flat"
        return Batches(split.images, split.labels, batch_size, channels_last=channels_last, flat=flat, **options)
