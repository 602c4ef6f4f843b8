"""Joins the processes that ``torchrun`` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

__all__ = ["joined", "leads", "started_by_torchrun"]

_TIMEOUT = 600.0  # seconds, enough for the slowest work that one rank does alone: writing, or measuring a latency


def started_by_torchrun() -> bool:
    """Whether this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def leads() -> bool:
    """Whether this process prints and writes for all: the only one, or rank 0."""
    return not started_by_torchrun() or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined() -> Iterator[None]:
    """Joins the processes that ``torchrun`` has started while inside, each with a GPU of its own, if there are any."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # by a caller that runs the command line from Python
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=float(os.environ.get("RLSPRUNE_TIMEOUT", _TIMEOUT)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    yield
    # Not after an error, as this would wait for the other ranks. All leave together, because torchrun ends ranks that
    # are still writing results if one that has left fails at its very end.
    dist.barrier()
    dist.destroy_process_group()
