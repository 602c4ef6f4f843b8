"""The peak memory of one inference."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsprune.model.calls import ExampleInputs, device_of, unwrap
from rlsprune.model.modes import inference

__all__ = ["peak_bytes"]


def peak_bytes(model: nn.Module, example_inputs: ExampleInputs) -> int:
    """Measures parameters, buffers and the most that results take at one time, in bytes. See `rlsprune.profile`."""
    tensors = [*unwrap(model).parameters(), *unwrap(model).buffers()]
    resident = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    with inference(model, example_inputs) as (plain, args, kwargs):
        device = device_of(plain, (args, kwargs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            plain(*args, **kwargs)
            torch.cuda.synchronize(device)
            working = torch.cuda.max_memory_allocated(device) - start
        else:
            present = [*plain.parameters(), *plain.buffers()]
            present += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            with _LiveBytes(present) as live:
                plain(*args, **kwargs)
            working = live.peak
    return sum(resident.values()) + working


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operations make until they are freed."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Held, so that no new storage can get the id of an old one.
        self._present = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in present)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:  # others have no storage of their own
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._present or key in self._alive:
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self._bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
