"""One-shot pruning by the scales of batch normalisation, which an L1 penalty has made sparse."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from rlsprune.app.baselines.common import Structured, lowest_overall
from rlsprune.graph import Group, Member
from rlsprune.graph.layers import axis_of, is_depthwise
from rlsprune.prune.select import cut_size

__all__ = ["NetSlimming", "initialise_scales"]


class NetSlimming(Structured):
    """Penalises the scales of batch norms while training, then removes the channels with the smallest scales.

    Liu et al., *Learning Efficient Convolutional Networks through Network Slimming*, ICCV 2017: the loss gets λ·Σ|γ|
    over the scales γ of the batch norms (by subgradient), then channels below one threshold over the whole network are
    removed, and the network is trained further without the penalty.

    The paper adds a batch norm after each hidden layer and prunes 70 % on MNIST and "50 % convolutional channels and
    50 % fully-connected nodes" on CIFAR-10 and SVHN: so there is one threshold over all convolutions and another over
    all fully-connected layers. As in the code of Liu et al., it is the scale at position ⌊ratio·N⌋ in ascending order,
    and only channels above it stay. N counts the channels of all layers of a kind, including those that are never cut,
    such as the network's outputs. Only this gives the paper's counts (319 of 640 channels and 506 of 1024 nodes in its
    Tables 2 and 3, 453 of 1536 nodes in its Table 1). Equal scales are ranked by their order, and one channel per layer
    stays.

    Our choices where they are silent: where several batch norms scale the same channels, as in a residual stage, their
    absolute scales add up; a layer without batch norm is left alone, with a warning. Call ``initialise_scales`` on a
    fresh network first.

    Args:
        model: The network, with a batch norm behind each hidden layer.
        optimizer: The optimizer whose state is cut with the network.
        example_inputs: A batch with which the network is traced.
        penalty: λ of the L1 penalty.
        **options: `ratio`, `prune_epoch`, `target` and `inverse`, as in `Structured`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        *,
        penalty: float = 1e-4,
        **options: Any,
    ) -> None:
        if not 0 <= penalty < float("inf"):
            raise ValueError(f"penalty={penalty} is not valid: give a number of at least 0")
        super().__init__(model, optimizer, example_inputs, **options)
        self.penalty = penalty
        without = [group.name for group in self.groups if not _norms(group)]
        if len(without) == len(self.groups):
            raise ValueError(
                f"no hidden layer has a batch norm with scales behind it ({', '.join(without)}): build the network "
                f"with batch norm"
            )
        if without:
            warnings.warn(f"no batch norm scales {', '.join(without)}: net slimming leaves them unpruned", stacklevel=2)
        self.groups = [group for group in self.groups if _norms(group)]
        self._norms = {member.module: None for group in self.groups for member in _norms(group)}

    @torch.no_grad()
    def after_backward(self) -> None:
        """Adds the subgradient of the penalty, λ·sign(γ), until the network is pruned."""
        if self.pruned:
            return
        for norm in self._norms:
            scale = norm.get_parameter("weight")
            if scale.grad is not None:
                scale.grad.add_(scale.sign(), alpha=self.penalty)

    def scores(self) -> list[Tensor]:
        """Returns the absolute scale of every channel."""
        return [torch.stack([_scales(member) for member in _norms(group)]).sum(0) for group in self.groups]

    def choose(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Chooses the units below the threshold of their kind of layer."""
        chosen: dict[int, Tensor] = {}
        for convolutional in (True, False):
            places = [place for place, group in enumerate(self.groups) if _is_convolutional(group) is convolutional]
            if places:
                own = [scores[place] for place in places]
                total = sum(map(len, own)) + self._uncut(convolutional)
                chosen.update(zip(places, lowest_overall(own, cut_size(self.ratio, total) + 1), strict=True))
        return [chosen[place] for place in range(len(scores))]

    def _uncut(self, convolutional: bool) -> int:
        """Counts the channels of the layers of this kind that are in no ranked group."""
        ranked = {member.module for group in self.groups for member in group.producers}
        kind = _ConvNd if convolutional else nn.Linear
        layers = [layer for layer in self.model.modules() if isinstance(layer, kind) and not is_depthwise(layer)]
        return sum(axis_of(layer, "out").size for layer in layers if layer not in ranked)


@torch.no_grad()
def initialise_scales(model: nn.Module, value: float = 0.25) -> None:
    """Sets all scales of a fresh network's batch norms, before it is trained.

    With PyTorch's scale of 1 the paper's settings diverge within a few steps. Behind a batch norm a hidden node's
    output has a mean of about 0.4·γ, so for n of them the curvature of Eq. (15) is about 0.16·n·γ² in the output layer,
    and a step size of 0.1 with momentum 0.9 is stable below 38. Liu et al. start from 0.5, with another loss; for the
    1024 nodes of the paper's convolutional network that curvature is still 41, which diverges. The paper is silent.

    Args:
        model: The network.
        value: The scale.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"value={value} is not valid: a scale must be above 0")
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.weight is not None:
            module.weight.fill_(value)


def _norms(group: Group) -> list[Member]:
    """Returns the batch norms with scales through which the units pass."""
    return [
        member
        for member in group.carriers
        if isinstance(member.module, _BatchNorm) and member.module.weight is not None
    ]


def _scales(member: Member) -> Tensor:
    return member.module.get_parameter("weight").detach().abs().cpu()[member.index].sum(1)


def _is_convolutional(group: Group) -> bool:
    return any(isinstance(member.module, _ConvNd) for member in group.producers)
