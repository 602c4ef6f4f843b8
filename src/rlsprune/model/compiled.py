"""How hooks on layers see inputs and gradients from inside compiled code, without breaking its graph.

What a hook does cannot be traced: random draws, tensor hooks, Python lists. In its place the compiled code calls
operators of ours, which are opaque to the compiler and run as ordinary Python.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Watcher(Protocol):
    """Who is told."""

    def told(self, layer: Any, inputs: Tensor) -> None:
        """A layer was called with these inputs, or the gradient of such a call has arrived."""


_numbers = itertools.count()
_watchers: dict[int, tuple[weakref.ref[Watcher], weakref.ref[nn.Module]]] = {}


def exporting() -> bool:
    """Whether torch.export runs the model on tensors without values, of which nothing can be learnt."""
    is_exporting: bool = getattr(torch.compiler, "is_exporting", bool)()  # torch 2.6 does not have it
    return is_exporting


def enlist(watcher: Watcher, layer: nn.Module) -> int:
    """A number by which compiled code finds a watcher and its layer, as long as both live."""
    number = next(_numbers)
    _watchers[number] = weakref.ref(watcher, lambda _: _watchers.pop(number, None)), weakref.ref(layer)
    return number


@torch.library.custom_op("rlsprune::seen", mutates_args=("mark",))
def noticed(inputs: Tensor, mark: Tensor, number: int) -> None:
    """Tells the watcher of a layer's inputs.

    Args:
        inputs: Of the layer, detached.
        mark: Any tensor that outlives the code; it is said to change, or compilers would take the call for useless.
        number: The watcher's.
    """
    _tell(number, inputs)


def with_gradient_noticed(layer: nn.Module, inputs: Tensor, output: Tensor, number: int) -> Tensor:
    """The output of a layer, of whose gradient the watcher will be told."""
    trained = any(p.requires_grad for p in layer.parameters(recurse=False))
    if not (trained and torch.is_grad_enabled() and output.requires_grad):
        return output
    result: Tensor = _Identity.apply(output, inputs.detach(), number)  # type: ignore[no-untyped-call]
    return result


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.number = number
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        return _arrived(deltas[0], inputs, ctx.number), None, None


@torch.library.custom_op("rlsprune::arrived", mutates_args=())
def _arrived(delta: Tensor, inputs: Tensor, number: int) -> Tensor:
    _tell(number, inputs)
    return delta.clone()


@_arrived.register_fake
def _(delta: Tensor, inputs: Tensor, number: int) -> Tensor:
    return torch.empty_like(delta)


def _tell(number: int, inputs: Tensor) -> None:
    if number in _watchers:
        watcher, layer = _watchers[number][0](), _watchers[number][1]()
        if watcher is not None and layer is not None:
            watcher.told(layer, inputs)
