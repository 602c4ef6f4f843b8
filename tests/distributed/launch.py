"""Starts a few processes on the loopback interface that run one function of a module together."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
TIMEOUT = 60.0  # seconds in which a rank has to answer
MESSAGES = (
    *("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "scatter", "barrier", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list"),
)


def start(
    ranks: int, function: str, folder: Path, *arguments: str, timeout: float = TIMEOUT
) -> list[subprocess.Popen[str]]:
    """One process per rank; ``function`` is ``"module:name"`` and is called with the folder and the arguments."""
    return start_command(ranks, "distributed.launch", function, str(folder), *arguments, timeout=timeout)


def start_command(ranks: int, module: str, *arguments: str, timeout: float = TIMEOUT) -> list[subprocess.Popen[str]]:
    """One process per rank, with the environment that torchrun gives it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "RANK_TIMEOUT": str(timeout),
    }
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def run(ranks: int, function: str, folder: Path, *arguments: str) -> list[Any]:
    """What the function returned on each rank."""
    finish(start(ranks, function, folder, *arguments))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Waits for all of them; each has to end well."""
    outputs = [process.communicate()[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output}"


@contextmanager
def watched(tell: Callable[[str], object]) -> Iterator[None]:
    """Tells the name of every message that this rank takes part in."""

    def telling(name: str) -> Any:
        call = getattr(dist, name)

        def told(*given: Any, **named: Any) -> Any:
            tell(name)
            return call(*given, **named)

        return told

    with pytest.MonkeyPatch.context() as patch:
        for name in MESSAGES:
            patch.setattr(dist, name, telling(name))
        yield


def main() -> None:
    """One rank."""
    torch.set_num_threads(1)
    function, folder, *arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["RANK_TIMEOUT"])))
    result = getattr(importlib.import_module(module), name)(Path(folder), *arguments)
    torch.save(result, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
