"""Memory that runs out in the middle of an event: everything is as it was, bit for bit."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prune.scenes import ACTIONS, made

EVENTS = ("prune", "step that prunes", "preview", "roll-back", "finish", "load")


class Memory(TorchDispatchMode):
    """Counts the operations that make tensors; at the n-th there is no memory left."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.made, self.fails_at = 0, fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable and "view" not in func.__name__ and "detach" not in func.__name__:
            self.made += 1
            if self.made == self.fails_at:
                raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def attack(name: str, folder: Path, tries: int) -> int:
    act, rng = ACTIONS[name][1], random.Random(name)
    scene = made(name, folder / "whole")
    before = scene.facts()
    with Memory() as memory:
        act(scene)
    after, undone = scene.facts(), 0
    for number in range(tries):
        scene = made(name, folder / str(number))
        fails_at = rng.randint(1, memory.made)
        # Which error comes of it is others' business too: safetensors, say, takes it for something else.
        with suppress(Exception), Memory(fails_at):
            act(scene)
        undone += scene.undone(before, after, f"{name}, allocation {fails_at}")
    return undone


@pytest.mark.parametrize("name", EVENTS)
def test_an_allocation_that_fails_undoes_everything(name: str, tmp_path: Path) -> None:
    assert attack(name, tmp_path, 8)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_any_allocation_may_fail(name: str, tmp_path: Path) -> None:
    assert attack(name, tmp_path, 200)
