"""Parts of a network that run by themselves: an experiment on one block costs a fraction of one on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rlsprune.graph.groups import Group
from rlsprune.model.tensors import tensors_in

__all__ = ["Parts", "common_module"]

_ROOM = 1 << 28
"""Bytes of inputs that are kept; modules whose inputs have no room do not run by themselves."""


class Parts:
    """The modules of a network, and the arguments of each one's first call."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._sizes: dict[nn.Module, int] = {}
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the modules' arguments in the block, in which the network runs once."""
        self._calls.clear()
        room = _ROOM

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal room
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs)))
            if module not in self._calls and size <= room:
                self._calls[module] = args, kwargs
                room -= size

        handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            for name, module in self._modules.items()
            if name and next(module.children(), None) is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def around(self, groups: Sequence[Group]) -> nn.Module | None:
        """Returns the innermost called module with all that these groups change; None if it has most modules."""
        names = {member.name for group in groups for member in group.members}
        names |= {member.name for group in groups if group.attention for member in group.attention.members}
        names |= {name for group in groups if group.attention for name in group.attention.attributes({})}
        names |= {name for group in groups for name in group.fitted}
        name = common_module(names)
        while name and self._modules.get(name) not in self._calls:
            name = name.rpartition(".")[0]
        module = self._modules[name]
        if module not in self._sizes:
            self._sizes[module] = sum(1 for _ in module.modules())
        return module if 2 * self._sizes[module] < len(self._modules) else None

    def call_of(self, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a module's call, as new tensors: the module may write to them."""
        memo: dict[int, Any] = {id(own): own for own in self._modules.values()}
        args, kwargs = copy.deepcopy(self._calls[module], memo)
        return args, kwargs


def common_module(names: Sequence[str] | set[str]) -> str:
    """Returns the name of the innermost module that has all of these in it."""
    paths = [name.split(".") for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
