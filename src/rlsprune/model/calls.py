"""A user's model and its calls, without wrappers and without this package's training hooks."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rlsprune.model.arguments import shown
from rlsprune.model.rebinding import rebind_functions
from rlsprune.model.sharded import plain_class, settle, sharded_modules
from rlsprune.model.tensors import is_sharded, whole

__all__ = [
    "ExampleInputs",
    "as_call",
    "bare_copy",
    "batch_size",
    "device_of",
    "explained_run",
    "measurable",
    "output_tensors",
    "unwrap",
    "wrappers",
]

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""One tensor, the positional arguments of the model, or its keyword arguments."""


def as_call(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments and keyword arguments with which `example_inputs` calls the model."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    kind = type(example_inputs).__name__
    raise TypeError(f"example_inputs is a {kind}: give a tensor, a tuple of arguments or a dict of keyword arguments")


@contextmanager
def explained_run(args: Sequence[Any], kwargs: Mapping[str, Any], what: str = "example_inputs") -> Iterator[None]:
    """Turns an error of the model's forward into one that names the inputs it was called with."""

    def shape(value: Any) -> str:
        return str(tuple(value.shape)) if isinstance(value, Tensor) and not value.is_nested else type(value).__name__

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        given = ", ".join([*map(shape, args), *(f"{key}={shape(value)}" for key, value in kwargs.items())])
        raise ValueError(f"the model cannot run on {what} of shape {given}: {type(error).__name__}: {error}") from error


def output_tensors(output: Any) -> list[Tensor]:
    """Returns every tensor in the output of a network."""
    if isinstance(output, Tensor):
        return [output]
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += output_tensors([getattr(leaf, item.name) for item in fields(leaf)])
        else:
            leaves.append(leaf)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def batch_size(inputs: ExampleInputs) -> int:
    """Returns the number of inputs in a batch: the first size of its first tensor that has one; 1 if none has."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Returns the wrappers around a model, the outermost first, and last the model itself."""
    layers = [model]
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return layers
        layers.append(model)


def unwrap(model: object) -> nn.Module:
    """Returns the module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    Raises:
        TypeError: The model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {shown(model)}: give a torch.nn.Module")
    return wrappers(model)[-1]


def bare_copy(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """Copies the unwrapped model without training hooks; input selectors and the user's forward hooks stay.

    The copy of a model divided by ``fully_shard`` is whole: all processes make it together, and each needs room for it.

    Args:
        model: Model to copy; it stays as it is.
        share_parameters: Whether the copy refers to the model's own parameters, for uses that only read them. Buffers
            are copied in either case, so that running the copy cannot change the model.
    """
    model = unwrap(model)
    settle(model)
    return _copied(
        model,
        {
            p: nn.Parameter(whole(p), p.requires_grad) if is_sharded(p) else p
            for p in model.parameters()
            if share_parameters or is_sharded(p)
        },
    )


def measurable(model: nn.Module) -> nn.Module:
    """Returns the model; if divided by ``fully_shard``, a whole copy of its shape whose weights take no memory."""
    settle(model)
    divided = [p for p in model.parameters() if is_sharded(p)]
    if not divided:
        return model
    zeros = {p: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) for p in divided}
    return _copied(model, {p: nn.Parameter(zero, p.requires_grad) for p, zero in zeros.items()})


def _copied(model: nn.Module, parameters: Mapping[Tensor, Tensor]) -> nn.Module:
    """Makes a deep copy without training hooks, in which some parameters are replaced by others."""
    # deepcopy takes what its memo holds as already copied. A hook that is a method of an optimizer would drag a copy of
    # the optimizer, with all its state, along.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_training_hook(hook))
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            memo[id(hooks)] = OrderedDict()
        # An activation that the model keeps for later cannot be copied, being part of a graph.
        kept = tree_leaves(
            [value for value in vars(module).values() if isinstance(value, Tensor | dict | list | tuple)]
        )
        memo.update((id(value), value.detach()) for value in kept if _is_activation(value))
    memo.update((id(parameter), other) for parameter, other in parameters.items())
    divided = sharded_modules(model)
    for module in divided:  # fully_shard forbids copies of its own class
        kind = plain_class(module)
        memo[id(module)] = kind.__new__(kind)
    with torch.no_grad():
        for module in divided:
            own = {key: value for key, value in vars(module).items() if not key.startswith("__composable_api")}
            vars(memo[id(module)]).update(copy.deepcopy(own, memo))
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{_uncopied(model, memo)} cannot be copied ({why}): give it a __deepcopy__") from error
    parts = (*model.modules(), *model.parameters(), *model.buffers())
    rebind_functions(copied, {id(part): memo[id(part)] for part in parts if id(part) in memo})
    return copied


def _uncopied(model: nn.Module, memo: dict[int, Any]) -> str:
    """Names the part of a model that cannot be copied."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_modules", "_parameters", "_buffers"):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    return f"{key} ({type(value).__name__}) of module {name!r}" if name else f"{key} of the model"
    return "the model"


def device_of(model: nn.Module, call: object) -> torch.device:
    """Returns the device that the model runs on."""
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def _is_activation(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


def _is_training_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook was registered to watch the training, by this package, or by ``fully_shard``."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    # Functions and bound methods name their module; an object that is called has it on its class.
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith(("rlsprune.", "torch.distributed.fsdp.")) and home != "rlsprune.model.selector"
