"""The processes that train one network together, and the messages that they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsprune.model.calls import wrappers

__all__ = ["DisagreementError", "RankLostError", "Ranks", "find_ranks"]

T = TypeVar("T")


class DisagreementError(RuntimeError):
    """Raised if processes that should hold the same network do not."""


class RankLostError(RuntimeError):
    """Raised if another process died, hangs or does something else."""


class Ranks:
    """A process group of more than one process. All processes must call every method together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # A process group cannot be pickled; the process that loads it belongs to another group, or to none.
        return find_ranks, ()

    def sum_(self, tensor: Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        with self._meeting("sums"):
            dist.all_reduce(tensor, group=self.group)

    def all_true(self, fact: Tensor) -> Tensor:
        """Whether a 0-dim bool is true on every rank, as a tensor that the host does not wait for."""
        everywhere = fact.to(torch.int32)
        with self._meeting("checks"):
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self.group)
        return everywhere.bool()

    def exchange(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Sends every rank's own tensors to all others, in place: ``parts[r]`` is overwritten with rank r's tensors.

        It sends one message per rank and dtype, all at the same time.
        """
        pending = []
        for owner, tensors in enumerate(parts):
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                flat = torch.cat([tensor.reshape(-1) for tensor in same])
                with self._meeting("results"):
                    source = dist.get_global_rank(self.group, owner)
                    work = dist.broadcast(flat, source, group=self.group, async_op=True)
                pending.append((owner, same, flat, work))
        for owner, same, flat, work in pending:
            with self._meeting("results"):
                work.wait()
            if owner != self.rank:
                for tensor, data in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                    tensor.copy_(data.view(tensor.shape))

    def stacked(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, of one shape and dtype, in a new first dimension. Sends one message."""
        everyone = tensor.new_empty(self.size, *tensor.shape)
        with self._meeting("rows"):
            dist.all_gather(list(everyone.unbind()), tensor.contiguous(), group=self.group)
        return everyone

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, of any kind that can be pickled, in the order of the ranks."""
        values: list[Any] = [None] * self.size
        with self._meeting("values"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, value: T) -> T:
        """Returns the value of rank 0."""
        return self.gather(value)[0]

    def agree(self, what: str, value: object) -> None:
        """Raises on every rank if their values differ. For mappings the message names the first entry that differs.

        Raises:
            DisagreementError: The values differ.
        """
        values = self.gather(value)
        for other, theirs in enumerate(values):
            if theirs != values[0]:
                what, mine, theirs = _difference(what, values[0], theirs)
                raise DisagreementError(
                    f"the ranks disagree on {what}: rank 0 has {_short(mine)}, rank {other} has {_short(theirs)}. Give "
                    "every rank the same model, settings and calls, and start again from the last checkpoint"
                )

    def gather_rows(self, tensor: Tensor | None, dim: int) -> Tensor | None:
        """Concatenates the tensors of all ranks along a dimension, without those that are None; None if all are."""
        outlines = self.gather(None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device.type))
        known = next((outline for outline in outlines if outline is not None), None)
        if known is None:
            return None
        device = torch.device(known[2]) if tensor is None else tensor.device
        parts = [
            tensor.contiguous()
            if rank == self.rank and tensor is not None
            else torch.empty(outline[0] if outline else 0, dtype=known[1], device=device)
            for rank, outline in enumerate(outlines)
        ]
        self.exchange([[part] if outline else [] for part, outline in zip(parts, outlines, strict=True)])
        return torch.cat([part for part, outline in zip(parts, outlines, strict=True) if outline], dim=dim)

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost the others while exchanging {what}: another rank has died, "
                "does not answer within the timeout, or has a network of another shape. Its own log says which; start "
                f"again from the last checkpoint. ({error})"
            ) from error


def find_ranks(model: nn.Module | None = None, group: dist.ProcessGroup | None = None) -> Ranks | None:
    """Returns the processes that train together with this one, or None if it is alone.

    Args:
        model: The model. If it is wrapped in DistributedDataParallel, the wrapper's process group is used.
        group: The process group to use instead; None for the wrapper's, or the default one if there is any.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for wrapper in wrappers(model) if group is None and model is not None else ():
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            group = wrapper.process_group
    group = group or dist.group.WORLD
    return Ranks(group) if group is not None and dist.get_world_size(group) > 1 else None


def _difference(what: str, mine: Any, theirs: Any) -> tuple[str, Any, Any]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in [*mine, *theirs]:
            if mine.get(key) != theirs.get(key):
                return key, mine.get(key), theirs.get(key)
    return what, mine, theirs


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
