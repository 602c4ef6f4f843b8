"""One process's share of distributed training."""

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
    """Batches that can be iterated many times."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Share:
    """Divides work among processes and combines their results; a single process does everything.

    Args:
        ranks: The processes; None for a single one.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks

    def of_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """Returns this rank's part of a batch, and the weight of its mean loss in the mean over the ranks.

        Every rank takes all of a batch of fewer than two images per rank, because batch norm cannot train on one.
        """
        if self.ranks is None or len(labels) < 2 * self.ranks.size:
            return inputs, labels, 1.0
        own = labels.tensor_split(self.ranks.size)[self.ranks.rank]
        weight = len(own) * self.ranks.size / len(labels)
        return inputs.tensor_split(self.ranks.size)[self.ranks.rank], own, weight

    def divided(self, batches: RepeatedBatches) -> RepeatedBatches:
        """Returns this rank's part of every batch."""
        return batches if self.ranks is None else _Divided(batches, self)

    def loss_of(self, network: Callable[[Tensor], Tensor], loss: Loss) -> Loss:
        """Makes a loss of this rank's part of a batch, weighted so that the mean over ranks is the batch's loss."""

        def weighted(inputs: Tensor, labels: Tensor) -> Tensor:
            inputs, labels, weight = self.of_batch(inputs, labels)
            value = loss(network(inputs), labels)
            return value if weight == 1 else weight * value

        return weighted

    def of_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Returns this rank's batches: every n-th of them for n ranks."""
        return iter(batches) if self.ranks is None else islice(batches, self.ranks.rank, None, self.ranks.size)

    def gathered(self, values: list[T]) -> list[T]:
        """Concatenates the lists of all ranks."""
        return values if self.ranks is None else [value for part in self.ranks.gather(values) for value in part]

    def totals(self, values: list[float]) -> list[float]:
        """Sums each value over the ranks."""
        return (
            values if self.ranks is None else [sum(column) for column in zip(*self.ranks.gather(values), strict=True)]
        )

    def means(self, values: list[float]) -> list[float]:
        """Averages each value over the ranks."""
        size = 1 if self.ranks is None else self.ranks.size
        return [total / size for total in self.totals(values)]

    def of_each(self, value: T) -> list[T]:
        """Returns every rank's value, in the order of ranks."""
        return [value] if self.ranks is None else self.ranks.gather(value)

    def own_of(self, values: Sequence[T]) -> T | None:
        """Returns this rank's value in a list that perhaps another number of ranks saved; None if it is too short."""
        rank = 0 if self.ranks is None else self.ranks.rank
        return values[rank] if rank < len(values) else None

    def by_first(self, compute: Callable[[], T]) -> T:
        """Computes a value on rank 0 and returns it on all ranks."""
        if self.ranks is None:
            return compute()
        value: Any = compute() if self.ranks.rank == 0 else None
        return cast(T, self.ranks.first(value))

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wraps the network for training, so that its gradients are averaged over the ranks."""
        return model if self.ranks is None else DistributedDataParallel(model)

    def changed(self, network: nn.Module) -> None:
        """Rebuilds the wrapper after the network inside may have been cut."""
        rebuild_around(network)

    @torch.no_grad()
    def align(self, model: nn.Module) -> None:
        """Broadcasts rank 0's buffers, because every rank has seen different images."""
        if self.ranks is not None:
            self.ranks.exchange([list(model.buffers())])

    def verify(self, model: nn.Module, result: nn.Module, optimizer: Optimizer) -> None:
        """Stops all ranks if their networks, the averages of these, or their optimizers differ."""
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
