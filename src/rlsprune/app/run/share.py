"""One process's part of a training that several do together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rlsprune.distributed.ddp import rebuild_around
from rlsprune.distributed.fingerprint import fingerprint
from rlsprune.distributed.ranks import Ranks
from rlsprune.training.loop import Loss

__all__ = ["Share"]

T = TypeVar("T")


class RepeatedBatches(Protocol):
    """Batches to be gone through many times."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Share:
    """The share of the work that this process does, and how results are combined; alone it does everything.

    Args:
        ranks: The processes, or None.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks

    def of_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """This rank's part of a batch, and the weight of its mean loss in the mean over the ranks.

        A batch of fewer than two images a rank is everybody's: batch norm cannot train on one.
        """
        if self.ranks is None or len(labels) < 2 * self.ranks.size:
            return inputs, labels, 1.0
        own = labels.tensor_split(self.ranks.size)[self.ranks.rank]
        weight = len(own) * self.ranks.size / len(labels)
        return inputs.tensor_split(self.ranks.size)[self.ranks.rank], own, weight

    def divided(self, batches: RepeatedBatches) -> RepeatedBatches:
        """This rank's part of every batch."""
        return batches if self.ranks is None else _Divided(batches, self)

    def loss_of(self, network: Callable[[Tensor], Tensor], loss: Loss) -> Loss:
        """The loss of this rank's part of a batch, weighted so that the ranks' mean is the batch's."""

        def weighted(inputs: Tensor, labels: Tensor) -> Tensor:
            inputs, labels, weight = self.of_batch(inputs, labels)
            value = loss(network(inputs), labels)
            return value if weight == 1 else weight * value

        return weighted

    def of_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """This rank's batches: one in as many as there are ranks."""
        return iter(batches) if self.ranks is None else islice(batches, self.ranks.rank, None, self.ranks.size)

    def gathered(self, values: list[T]) -> list[T]:
        """The values of all ranks."""
        return values if self.ranks is None else [value for part in self.ranks.gather(values) for value in part]

    def totals(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks."""
        return (
            values if self.ranks is None else [sum(column) for column in zip(*self.ranks.gather(values), strict=True)]
        )

    def means(self, values: list[float]) -> list[float]:
        """Each value averaged over the ranks."""
        size = 1 if self.ranks is None else self.ranks.size
        return [total / size for total in self.totals(values)]

    def of_each(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        return [value] if self.ranks is None else self.ranks.gather(value)

    def own_of(self, values: Sequence[T]) -> T | None:
        """This rank's among values that perhaps another number of ranks had; None if there were too few."""
        rank = 0 if self.ranks is None else self.ranks.rank
        return values[rank] if rank < len(values) else None

    def by_first(self, compute: Callable[[], T]) -> T:
        """What rank 0 computes, on all ranks."""
        if self.ranks is None:
            return compute()
        value: Any = compute() if self.ranks.rank == 0 else None
        return cast(T, self.ranks.first(value))

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The network as it is trained: its gradients are averaged over the ranks."""
        return model if self.ranks is None else DistributedDataParallel(model)

    def changed(self, network: nn.Module) -> None:
        """Rebuilds the wrapper. Call it whenever the network inside may have been cut."""
        rebuild_around(network)

    @torch.no_grad()
    def align(self, model: nn.Module) -> None:
        """Broadcasts rank 0's buffers: every rank has seen other images."""
        if self.ranks is not None:
            self.ranks.exchange([list(model.buffers())])

    def verify(self, model: nn.Module, result: nn.Module, optimizer: Optimizer) -> None:
        """Stops all ranks if their networks, what is kept of them, or their optimizers have come to differ."""
        if self.ranks is None:
            return
        self.ranks.agree("the network", fingerprint(model, optimizer))
        if result is not model:
            self.ranks.agree("the average of the network", fingerprint(result, None))


class _Divided:
    """One rank's parts of batches."""

    def __init__(self, batches: RepeatedBatches, share: Share) -> None:
        self._batches, self._share = batches, share

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._share.of_batch(inputs, labels)[:2] for inputs, labels in self._batches)
