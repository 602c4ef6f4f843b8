"""One-shot pruning of whole filters by the L1 norm of their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsprune.app.baselines.common import Structured
from rlsprune.graph import Member
from rlsprune.graph.layers import axis_of

__all__ = ["L1Norm"]


class L1Norm(Structured):
    """Removes the same share of every hidden layer: the filters with the smallest L1 norm.

    Li et al., *Pruning Filters for Efficient ConvNets*, ICLR 2017: after training, each layer loses the filters with
    the smallest sum of absolute kernel weights, together with the kernels that read them, and the network is trained
    further. The paper compares with one share for all hidden layers, 0.7 on MNIST and 0.5 on CIFAR-10 and SVHN.

    Our choices where they are silent: all layers are scored before any is cut (their "independent" pruning); a node of
    a fully-connected layer is a filter; ⌊(1−ratio)·n⌋ filters stay, at least one; where several layers make the same
    channels, as in a residual stage, their norms add up; scales of batch norms do not count.

    Args:
        model: The network.
        optimizer: The optimizer whose state is cut with the network.
        example_inputs: A batch with which the network is traced.
        ratio: The share of every hidden layer to prune.
        prune_epoch: The epoch, from 1, after which to prune; None for the unpruned twin.
        target: The share to keep, as in `Structured`.
        inverse: The update of P, as in `Structured`.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU(), torch.nn.Linear(10, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = L1Norm(model, optimizer, torch.randn(1, 4), ratio=0.7, prune_epoch=2)
        >>> method.end_epoch(1, 0.5), method.end_epoch(2, 0.4).layers
        (None, (LayerChange(name='0', before=10, after=3),))
    """

    def scores(self) -> list[Tensor]:
        """Computes the L1 norm of every filter."""
        return [torch.stack([_filter_norms(member) for member in group.producers]).sum(0) for group in self.groups]


def _filter_norms(member: Member) -> Tensor:
    """Sums the absolute weights that make each unit."""
    weight = member.module.get_parameter("weight").detach()
    slab = next(slab for slab in axis_of(member.module, member.side).slabs if slab.tensor == "weight")
    rows = weight.abs().movedim(slab.dim, 0).flatten(1)
    norms = rows.sum(1, dtype=torch.promote_types(weight.dtype, torch.float32)).cpu()
    # An entry that several groups of a transposed convolution share must count only once.
    return norms[member.index % len(norms)].sum(1) / slab.groups
