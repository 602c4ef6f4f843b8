"""One run of the network: the order and number of its layers' calls, and the readers of its raw input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from rlsprune.model.calls import ExampleInputs, as_call, explained_run, output_tensors
from rlsprune.model.tensors import tensors_in

# Functions whose result holds the same features along its last dimension, or a flattened image's.
_SAME_FEATURES = {
    *("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "clone", "detach", "dropout", "dropout_"),
    *("to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "requires_grad_"),
}


@dataclass
class Call:
    """A call of the network on the example inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example_inputs: ExampleInputs) -> Call:
        """Makes a call of one tensor, of a tuple or list of arguments, or of a mapping of keyword arguments."""
        return cls(*as_call(example_inputs))

    def of_few(self) -> Call:
        """Returns the call with the first two of its batch; itself if it has no more, or no batch dimension is seen."""
        given = (self.args, self.kwargs)
        sizes = {len(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim}
        if len(sizes) != 1 or max(sizes) <= 2:
            return self
        return Call(*tree_map(lambda leaf: leaf[:2] if isinstance(leaf, Tensor) and leaf.ndim else leaf, given))

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns the arguments' floating-point tensors: ``input`` if it is the sole argument, or ``input[key]``."""
        items = [*enumerate(self.args), *self.kwargs.items()]
        found = {f"input[{key}]": x for key, x in items if isinstance(x, Tensor) and x.is_floating_point()}
        return {"input": next(iter(found.values()))} if len(items) == 1 and found else found


@dataclass
class RawInput:
    """The readers of one input tensor."""

    readers: list[nn.Linear] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Names of everything else that it went to."""


@dataclass
class Observation:
    """The findings of one run."""

    calls: dict[nn.Module, int]
    sources: dict[nn.Module, nn.Module]
    """Module → the module whose output it was first called with, if there is one."""
    inputs: dict[str, RawInput]


def observe(model: nn.Module, call: Call, following: AbstractContextManager[None]) -> tuple[Observation, Any]:
    """Runs the network once and watches it.

    Args:
        model: The network.
        call: Call of the network.
        following: Another watcher of the run.

    Returns:
        The observation, and the network's output.

    Raises:
        ValueError: if the network cannot run on these inputs.
    """
    calls: dict[nn.Module, int] = {}

    sources: dict[nn.Module, nn.Module] = {}
    # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
    made: dict[int, tuple[nn.Module, Tensor]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if args and id(args[0]) in made:
            sources.setdefault(module, made[id(args[0])][0])

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not list(module.children()):
            made[id(output)] = (module, output)

    raw = call.named_tensors()
    watch = _RawInputs(model, raw)
    # Without gradients, hooks that watch the training (ours, say) do not take part and are not taken for readers.
    with (
        explained_run(call.args, call.kwargs),
        torch.no_grad(),
        hooked(model.modules(), enter, leave),
        watch,
        following,
    ):
        output = model(*call.args, **call.kwargs)
    for tensor in output_tensors(output):
        watch.note(tensor, "the network's output")
    return Observation(calls, sources, watch.seen), output


@contextmanager
def hooked(
    modules: Iterable[nn.Module], before: Callable[..., Any], after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Registers a forward pre-hook on these modules, and a forward hook if one is given, for the block."""
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before))
        if after is not None:
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _RawInputs(TorchFunctionMode):
    """Follows the input tensors through the functions that leave their features as they are."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.seen = {name: RawInput() for name in tensors}
        # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
        self._raw: dict[int, tuple[str, Tensor]] = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
        self._linear = {id(m._parameters.get("weight")): m for m in model.modules() if isinstance(m, nn.Linear)}

    def note(self, tensor: Tensor, reader: str) -> None:
        """Records that this tensor, if it is raw input, goes to something other than a linear layer."""
        if id(tensor) in self._raw:
            self.seen[self._raw[id(tensor)][0]].others.append(reader)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        touched = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._raw]
        if not touched or not tensors_in(result):
            return result
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", str(func))
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is torch.nn.functional.linear and touched[0] is first and id(weight) in self._linear:
            self.seen[self._raw[id(first)][0]].readers.append(self._linear[id(weight)])
        elif (
            isinstance(result, Tensor)
            and touched[0] is first
            and result.ndim > 0
            and _keeps_features(name, touched[0], result.shape[-1], args, kwargs)
        ):
            self._raw[id(result)] = (self._raw[id(first)][0], result)
        else:
            for tensor in touched:
                self.note(tensor, name)
        return result


def _keeps_features(name: str, tensor: Tensor, width: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "index_select":
        # A network that has already lost inputs picks those it kept with this.
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return dim in (-1, tensor.ndim - 1)
    # The features must stay one dimension: that of the tensor, or of the flattened image.
    return name in _SAME_FEATURES and width in (tensor.shape[-1], tensor[0].numel())
