"""The inputs that a network in training has just seen, kept for a refit."""

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

# Number of inputs that are kept; fewer if they would take more bytes than the second number.
_INPUTS, _BYTES = 512, 2**27
_PLAIN = (Tensor, bool, int, float, str, type(None))


class RecentInputs:
    """The inputs of the last forwards that count, up to a limit.

    Args:
        model: The network. A hook watches it, which compiled code skips.
        counts: A function that returns whether a forward of the network counts.
    """

    def __init__(self, model: nn.Module, counts: Callable[[nn.Module], bool]) -> None:
        self._calls: deque[ExampleInputs] = deque()
        self._odd = False
        self._counts = counts
        # First of all hooks: a copy of the network calls the user's own hooks again on the kept inputs.
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
        """Returns the inputs as a calibration for a refit.

        Raises:
            ValueError: There are no inputs, or the network was called with inputs that cannot be divided.
        """
        if not self._calls and self._odd:
            raise ValueError(
                "its calls have tensors of different lengths, things that are neither tensors nor numbers, or hooks"
            )
        if not self._calls:
            raise ValueError(
                "none of its forwards was seen, because it is compiled or its layers are called without calling it: "
                "call calibrate() with batches before an event"
            )
        numbers = torch.split(torch.arange(sum(map(batch_size, self._calls))), list(map(batch_size, self._calls)))
        return Calibration.of(Sample([(call, None) for call in self._calls], list(numbers)))

    def observe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the inputs of a forward that the network is about to make, if it counts."""
        if not self._counts(model):
            return
        call = _call(model, args, kwargs)
        leaves = tree_leaves(call)
        # Edges of a graph, or offsets into tokens, refer to other tensors: such a call cannot be divided.
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
    """Returns the arguments of a call, all by name if some are; None if the others cannot be named."""
    if not args or not kwargs:
        return kwargs or args
    if len(model._forward_pre_hooks) > 1:  # the user's hooks may look at positional arguments
        return None
    names = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    if len(names) < len(args) or any(name.kind is not name.POSITIONAL_OR_KEYWORD for name in names):
        return None
    return {name.name: value for name, value in zip(names, args, strict=True)} | kwargs


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _room(call: ExampleInputs) -> int:
    """Returns how many inputs like these are kept."""
    taken = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(call) if isinstance(leaf, Tensor))
    return max(1, min(_INPUTS, _BYTES * batch_size(call) // max(taken, 1)))


class _Hook:
    """A hook that passes a network's inputs to their keeper, by a weak reference. Its copies and pickles do nothing."""

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
