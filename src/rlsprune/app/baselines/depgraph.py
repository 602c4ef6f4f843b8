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
    """Removes the channels whose group, of all parameters that go with them, has the smallest norm.

    Fang et al., *DepGraph: Towards Any Structural Pruning*, CVPR 2023: a channel is scored by the squared L2 norms of
    all slices that must go with it (of the layers that make it, normalise it and read it), averaged over these layers.
    This is their method "group_norm", that without sparsity learning, in which scores are divided by the layer's mean.
    The scores are torch-pruning's own; the removal is ours, because theirs replaces the parameters that the optimizer
    knows.

    Ours where they are silent: it prunes once, in one step, to ⌊(1−ratio)·n⌋ channels; one channel per layer stays.

    Args:
        model: The network.
        optimizer: Whose state is cut with the network.
        example_inputs: What the network is traced with.
        scope: ``"layer"``: this share of every hidden layer. ``"network"``: all channels are ranked together.
        **options: `ratio`, `prune_epoch`, `target` and `inverse`, as of `Structured`.
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
        """The group norm of every channel."""
        return group_norms(self.model, self.example_inputs, self.groups)

    def choose(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """The units that go: of every layer, or of the network as a whole."""
        if self.scope == "layer":
            return super().choose(scores)
        total = sum(map(len, scores))
        return lowest_overall(scores, total - stays(total, self.ratio))
