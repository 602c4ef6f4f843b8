"""The inputs that a network in training has just seen, kept to refit it on."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rlsprune.model.calls import ExampleInputs, batch_size
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.training.batches import Sample, split

__all__ = ["RecentInputs"]

# Inputs that are kept, fewer where these would take more bytes than the second number.
_INPUTS, _BYTES = 512, 2**27
_PLAIN = (Tensor, bool, int, float, str, type(None))


class RecentInputs:
    """What the last forwards that count were called with, at most so many inputs.

    Args:
        model: The network. It is watched by a hook, which compiled code skips.
        counts: Whether a forward that the network is about to make counts.
    """

    def __init__(self, model: nn.Module, counts: Callable[[nn.Module], bool]) -> None:
        self._calls: deque[ExampleInputs] = deque()
        self._odd = False
        self._counts = counts
        # First of all: a copy of the network calls the user's own hooks again on what is kept.
        self._handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)

    def clear(self) -> None:
        """Forgets the inputs."""
        self._calls.clear()
        self._odd = False

    def close(self) -> None:
        """Removes the hook from the model."""
        self._handle.remove()
        self.clear()

    def calibration(self) -> Calibration:
        """The inputs as something to refit on.

        Raises:
            ValueError: There are none, or the network was called with what cannot be taken a part of.
        """
        if not self._calls and self._odd:
            raise ValueError(
                "its calls have tensors of different lengths, things that are neither tensors nor numbers, or hooks"
            )
        if not self._calls:
            raise ValueError(
                "none of its forwards was seen, as it is compiled, or its layers are called without calling it: "
                "calibrate() with batches before an event"
            )
        numbers = torch.split(torch.arange(sum(map(batch_size, self._calls))), list(map(batch_size, self._calls)))
        return Calibration.of(Sample([(call, None) for call in self._calls], list(numbers)))

    def observe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a forward of the network."""
        if not self._counts(model):
            return
        call = _call(model, args, kwargs)
        leaves = tree_leaves(call)
        # Edges of a graph, or offsets into tokens, refer to other tensors: no part can be taken of such a call.
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if call is None or len(sizes) != 1 or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            self._odd = True
            return
        if sizes == {0}:
            return
        most = _room(call)
        self._calls.append(tree_map(_own, split(call, most)[0]))
        while len(self._calls) > 1 and sum(map(batch_size, self._calls)) > most:
            self._calls.popleft()


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExampleInputs | None:
    """The arguments of a call, all by name where some are; None if others have no name."""
    if not args or not kwargs:
        return kwargs or args
    if len(model._forward_pre_hooks) > 1:  # those of the user may look at positional arguments
        return None
    names = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    if len(names) < len(args) or any(name.kind is not name.POSITIONAL_OR_KEYWORD for name in names):
        return None
    return {name.name: value for name, value in zip(names, args, strict=True)} | kwargs


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _room(call: ExampleInputs) -> int:
    """How many inputs such as these are kept."""
    taken = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(call) if isinstance(leaf, Tensor))
    return max(1, min(_INPUTS, _BYTES * batch_size(call) // max(taken, 1)))


class _Hook:
    """Passes a network's inputs on to their keeper, which it holds weakly; a copy or a pickle of it is idle."""

    def __init__(self, keeper: RecentInputs | None) -> None:
        self._keeper = None if keeper is None else weakref.ref(keeper)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.observe(model, args, kwargs)
