"""A user's model as it is measured, exported and saved: without wrappers and without our training hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = [
    "ExampleInputs",
    "as_call",
    "bare_copy",
    "device_of",
    "evaluate",
    "inference",
    "plain_attention",
    "unwrap",
    "wrappers",
]

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""One tensor, the positional arguments of the model, or its keyword arguments."""


def as_call(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments with which `example_inputs` calls the model."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    kind = type(example_inputs).__name__
    raise TypeError(f"example_inputs is a {kind}: give a tensor, a tuple of arguments or a dict of keyword arguments")


def wrappers(model: nn.Module) -> list[nn.Module]:
    """What is wrapped around a model, the outermost first, and last the model itself."""
    layers = [model]
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return layers
        layers.append(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    return wrappers(model)[-1]


def bare_copy(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """A copy of the unwrapped model without training hooks; input selectors and the user's forward hooks stay.

    Args:
        model: Left as it is.
        share_parameters: Let the copy refer to the model's own parameters, for uses that only read them. Buffers are
            copied in either case, so that running the copy cannot change the model.
    """
    model = unwrap(model)
    # deepcopy takes what its memo holds as already copied. A hook that is a method of an optimizer would drag a copy of
    # the optimizer, with all its state, along.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_training_hook(hook))
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            memo[id(hooks)] = OrderedDict()
        # An activation that the model keeps for later cannot be copied, being part of a graph.
        memo.update((id(value), value.detach()) for value in vars(module).values() if _is_activation(value))
    if share_parameters:
        memo.update((id(parameter), parameter) for parameter in model.parameters())
    with torch.no_grad():
        return copy.deepcopy(model, memo)


@contextlib.contextmanager
def inference(
    model: nn.Module, example_inputs: ExampleInputs
) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """A copy of the model to run, and the arguments to run it with: in `eval()`, without gradients, leaving no trace.

    The copy shares the model's parameters. Random number generators are as before afterwards.
    """
    args, kwargs = as_call(example_inputs)
    plain = bare_copy(model, share_parameters=True).eval()
    device = device_of(plain, (args, kwargs))
    generators = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(generators, device_type=generators[0].type if generators else "cuda"), torch.no_grad():
        yield plain, args, kwargs


@contextlib.contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """In `eval()` and without gradients; every module is in its own mode again afterwards."""
    modes = {module: module.training for network in networks for module in network.modules()}
    try:
        for network in networks:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def evaluate(model: nn.Module, batches: Iterable[Any], example_inputs: ExampleInputs) -> int:
    """Runs the model itself, hooks and all, over batches in `eval()`; its mode is as before afterwards.

    Args:
        model: The network.
        batches: Inputs as the model takes them, or (inputs, targets) pairs as a data loader gives them.
        example_inputs: What a single call takes, to tell the two apart.

    Returns:
        How many batches there were.
    """
    kind = next(kind for kind in (Tensor, Mapping, tuple, list) if isinstance(example_inputs, kind))
    count = 0
    with evaluating(model):
        for batch in batches:
            paired = isinstance(batch, tuple | list) and len(batch) > 0 and isinstance(batch[0], kind)
            args, kwargs = as_call(batch[0] if paired else batch)
            model(*args, **kwargs)
            count += 1
    return count


def device_of(model: nn.Module, call: object) -> torch.device:
    """Where the model runs."""
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by the operations it is made of: its fused inference path is opaque to FLOP counting and exporters."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _is_activation(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


def _is_training_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook was registered by this package to watch the training."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    # Functions and bound methods name their module; an object that is called has it on its class.
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith("rlsprune.") and home != "rlsprune.inputs"
