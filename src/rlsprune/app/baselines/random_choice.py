"""One-shot pruning of whole units that are drawn by lot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.baselines.common import Structured

__all__ = ["RandomChoice"]


class RandomChoice(Structured):
    """Removes the same share of every hidden layer, drawn by lot: what any choice has to be better than.

    The widths are those of `L1Norm` at the same ratio. The lot depends on the seed alone, not on torch's random state.

    Args:
        model: The network.
        optimizer: Whose state is cut with the network.
        example_inputs: What the network is traced with.
        seed: Of the lot.
        **options: `ratio`, `prune_epoch`, `target` and `inverse`, as of `Structured`.
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
        """A number drawn for every unit."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(group.size, generator=generator) for group in self.groups]
