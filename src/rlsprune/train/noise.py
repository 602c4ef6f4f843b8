"""What happens to training batches on their way to the network.

Everything is drawn on the CPU, whose random state the checkpoint has, so that a run goes on alike on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributions import Beta
from torch.nn import functional as F  # noqa: N812

from rlsprune.train.loop import Batch

__all__ = ["drop_inputs", "mix_pairs"]


def drop_inputs(batches: Iterable[Batch], share: float) -> Iterator[Batch]:
    """Sets that share of the input values to zero, and scales the others up to match."""
    for inputs, labels in batches:
        kept = (torch.rand(inputs.shape) >= share).to(inputs.device)
        yield inputs * kept / (1 - share), labels


def mix_pairs(batches: Iterable[Batch], classes: int, a: float) -> Iterator[Batch]:
    """Mixes the first image of a batch with the last, the second with the last but one, and so on; targets alike.

    By a share for each batch from Beta(a, a). The order of a batch is random, and so are the pairs.
    """
    shares = Beta(a, a)
    for inputs, labels in batches:
        share = float(shares.sample())
        targets = F.one_hot(labels, classes).to(inputs.dtype)
        yield inputs.lerp(inputs.flip(0), share), targets.lerp(targets.flip(0), share)
