"""One-shot pruning by the norms of whole dependency groups, as torch-pruning does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.baselines.common import Structured, lowest_overall, stays
from rlsprune.app.baselines.group_norm import group_norms

__all__ = ["DepGraph"]

Scope = Literal["layer", "network"]


class DepGraph(Structured):
    """Removes the channels with the smallest norm of their group: all parameters that are removed with them.

    Fang et al., *DepGraph: Towards Any Structural Pruning*, CVPR 2023: a channel is scored by the squared L2 norms of
    all slices that are removed with it (of the layers that make it, normalise it and read it), averaged over these
    layers. This is their method "group_norm" without sparsity learning, which divides scores by the layer's mean. The
    scores are torch-pruning's own; the removal is ours, because theirs replaces the parameters of the optimizer.

    Our choices where they are silent: it prunes once, in one step, to ⌊(1−ratio)·n⌋ channels; one channel per layer
    stays.

    Args:
        model: The network.
        optimizer: The optimizer whose state is cut with the network.
        example_inputs: A batch with which the network is traced.
        scope: ``"layer"`` prunes this share of every hidden layer, ``"network"`` ranks all channels together.
        **options: `ratio`, `prune_epoch`, `target` and `inverse`, as in `Structured`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        *,
        scope: Scope = "layer",
        **options: Any,
    ) -> None:
        if scope not in get_args(Scope):
            raise ValueError(f"scope={scope!r} is not valid: it must be one of {', '.join(get_args(Scope))}")
        super().__init__(model, optimizer, example_inputs, **options)
        self.scope = scope

    def scores(self) -> list[Tensor]:
        """Computes the group norm of every channel."""
        return group_norms(self.model, self.example_inputs, self.groups)

    def choose(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Chooses the units to prune, of every layer or of the network as a whole."""
        if self.scope == "layer":
            return super().choose(scores)
        total = sum(map(len, scores))
        return lowest_overall(scores, total - stays(total, self.ratio))
