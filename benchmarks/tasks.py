"""Networks with their data and loss for the benchmarks of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.networks import mini_vgg
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.data import Batches, Split
from rlsprune.app.models import FNN, ResNet


@dataclass(frozen=True)
class Task:
    """A network and its training."""

    build: Callable[[], nn.Module]
    data: str
    loss_name: str
    batch: int
    rate: float
    """η of RLS: 1, or 0.1 with batch norm."""

    @property
    def flat(self) -> bool:
        """Returns whether the network takes vectors, not images."""
        return self.data in ("mnist", "digits")

    @property
    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the loss function."""
        return LOSSES[self.loss_name]

    def batches(self, split: Split, seed: int, augment: str | None = None) -> Batches:
        """Returns training batches, in the order of the seed."""
        return Batches(
            split.images,
            split.labels,
            self.batch,
            seed=seed,
            flat=self.flat,
            channels_last=not self.flat,
            augment=augment,
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> tuple[float, float]:
        """Computes accuracy in % and loss, in evaluation mode."""
        model.eval()
        parts = Batches(split.images, split.labels, 500, shuffle=False, flat=self.flat, channels_last=not self.flat)
        outputs = torch.cat([model(images) for images, _ in parts])
        model.train()
        return 100 * (outputs.argmax(1) == split.labels).float().mean().item(), self.loss(outputs, split.labels).item()


TASKS = {
    "fnn": Task(FNN, "mnist", "mse", 128, 1.0),
    "vgg": Task(mini_vgg, "cifar10", "mse", 64, 1.0),
    "resnet20": Task(lambda: ResNet(20).to(memory_format=torch.channels_last), "cifar10", "cross-entropy", 64, 0.1),
}
