"""One-shot pruning of whole units that are drawn at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.baselines.common import Structured

__all__ = ["RandomChoice"]


class RandomChoice(Structured):
    """Removes the same share of every hidden layer, drawn at random: any method should do better.

    The widths are those of `L1Norm` at the same ratio. The choice depends only on the seed, not on torch's random
    state.

    Args:
        model: The network.
        optimizer: The optimizer whose state is cut with the network.
        example_inputs: A batch with which the network is traced.
        seed: The seed of the choice.
        **options: `ratio`, `prune_epoch`, `target` and `inverse`, as in `Structured`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        *,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, example_inputs, **options)
        self.seed = seed

    def scores(self) -> list[Tensor]:
        """Draws a number for every unit."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(group.size, generator=generator) for group in self.groups]
