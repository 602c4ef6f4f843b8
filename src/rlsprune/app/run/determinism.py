"""The switch behind `--deterministic`, with which a run gives the same numbers every time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

__all__ = ["deterministic"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Restricts torch, while the block runs, to algorithms that give the same numbers every time; others raise.

    On a CPU, runs with the same seed and number of threads are equal bit for bit even without it. The block guarantees
    that, also on CUDA, where some operations are then slower and a few are missing. The caller sets the seeds.

    Example:
        >>> with deterministic():
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    os.environ.setdefault(_CUBLAS, ":4096:8")  # read when CUDA starts: without it cuBLAS is not repeatable
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
