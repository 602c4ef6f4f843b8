"""The same numbers every time: the switch behind `--deterministic`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

__all__ = ["deterministic"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """While the block runs, torch uses only algorithms that give the same numbers every time, or raises.

    On a CPU, runs with the same seed and number of threads are the same bit for bit without it; this makes sure of it,
    and extends it to CUDA, where some operations are slower for it and a few are missing. Seeds are the caller's.

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
