"""The outputs of a network's layers in one run after the other, seen by hooks that are registered once."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rlsprune.model.calls import output_tensors

__all__ = ["LayerWatch"]


class LayerWatch:
    """A context that watches the layers of a network."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules() if next(module.children(), None) is None}
        self.made: dict[nn.Module | str, list[Tensor]] = {}
        """Outputs of each layer since `begin`, in the order of their calls."""
        self.entered: nn.Module | None = None
        """The layer that was called last."""
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Forgets what was seen."""
        self.made, self.entered = {}, None

    def __enter__(self) -> LayerWatch:
        def enter(module: nn.Module, _: Any) -> None:
            self.entered = module

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self.made.setdefault(module, []).extend(output_tensors(output))

        for layer in self.names:
            self._handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self.begin()
