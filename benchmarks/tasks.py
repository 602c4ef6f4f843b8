"""Networks to train, with their data and loss: what the benchmarks of training have in common."""

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
    """A network, and how it is trained."""

    build: Callable[[], nn.Module]
    data: str
    loss_name: str
    batch: int
    rate: float
    """η of RLS: 1, and a tenth of it with batch norm."""

    @property
    def flat(self) -> bool:
        """Whether the network takes vectors, not images."""
        return self.data in ("mnist", "digits")

    @property
    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The loss itself."""
        return LOSSES[self.loss_name]

    def batches(self, split: Split, seed: int, augment: str | None = None) -> Batches:
        """Training batches, in the order of the seed."""
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
        """Accuracy in % and loss, in evaluation mode."""
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
