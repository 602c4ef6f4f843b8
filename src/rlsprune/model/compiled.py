"""Operators by which hooks on layers see inputs and gradients inside compiled code, without breaking its graph.

The work of a hook cannot be traced: random draws, tensor hooks, Python lists. In its place the compiled code calls
these operators, which are opaque to the compiler and run as ordinary Python.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Watcher(Protocol):
    """The receiver of a layer's inputs."""

    def told(self, layer: Any, inputs: Tensor) -> None:
        """Receives the inputs of a layer that was called, or to which the gradient of such a call has arrived."""


_numbers = itertools.count()
_watchers: dict[int, tuple[weakref.ref[Watcher], weakref.ref[nn.Module]]] = {}


def exporting() -> bool:
    """Whether torch.export runs the model on tensors without values, from which nothing can be learnt."""
    is_exporting: bool = getattr(torch.compiler, "is_exporting", bool)()  # torch 2.6 does not have it
    return is_exporting


def enlist(watcher: Watcher, layer: nn.Module) -> int:
    """Returns a number by which compiled code finds a watcher and its layer, as long as both live."""
    number = next(_numbers)
    _watchers[number] = weakref.ref(watcher, lambda _: _watchers.pop(number, None)), weakref.ref(layer)
    return number


@torch.library.custom_op("rlsprune::seen", mutates_args=("mark",))
def noticed(inputs: Tensor, mark: Tensor, number: int) -> None:
    """Tells a watcher the inputs of its layer.

    Args:
        inputs: Inputs of the layer, detached.
        mark: Any tensor that outlives the code. It is declared to change, or compilers would drop the call as useless.
        number: Number of the watcher.
    """
    _tell(number, inputs)


def with_gradient_noticed(layer: nn.Module, inputs: Tensor, output: Tensor, number: int) -> Tensor:
    """Wraps the output of a layer, so that the watcher is told when its gradient arrives."""
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
