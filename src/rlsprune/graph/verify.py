"""Proof by experiment: a network without some channels must equal the network with them zeroed where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from rlsprune.graph.cuts import cut, plan_cuts
from rlsprune.graph.groups import Group
from rlsprune.graph.observe import Call, hooked
from rlsprune.model.calls import bare_copy, output_tensors
from rlsprune.model.interrupts import stop_if_interrupted
from rlsprune.model.selector import select_inputs
from rlsprune.model.tensors import complement

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_SEED = 0
_OUTPUT = "the network's output"


def verify_groups(model: nn.Module, call: Call, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """Keep the groups from which any channels can go.

    All are tried at once, and halves only after a failure: one unit of each, which shows code that needs the width
    to be a multiple of something, then several. Groups that share a layer are tried again in so many selections that
    any two of them are once told apart: ``torch.chunk`` is right while both halves lose equally many.

    Returns:
        The groups that passed, and name → reason of the others.
    """
    trial = _Trial(model, call)
    failed: dict[str, str] = {}
    for amount in (0.0, 0.5):
        trial.search([group for group in groups if group.name not in failed], amount, failed)
    shared = _sharing([group for group in groups if group.name not in failed])
    selections = [[g for i, g in enumerate(shared) if i >> bit & 1] for bit in range((len(shared) - 1).bit_length())]
    # Number 0 is in none of these.
    for selection in [*selections, shared[:1]] if shared else []:
        for amount in (0.0, 1.0):
            trial.search([group for group in selection if group.name not in failed], amount, failed)
    return [group for group in groups if group.name not in failed], failed


def verify_inputs(model: nn.Module, call: Call, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """Keep the groups of input features of which one can go: tried on a copy, which has weights of its own there.

    A network may use the weight of a layer elsewhere in its forward, which no module tells.

    Returns:
        The groups that passed, and name → reason of the others.
    """
    failed: dict[str, str] = {}
    for group in groups:
        whole, small = (bare_copy(model, share_parameters=True) for _ in range(2))
        for member in group.consumers:
            gone = member.index[-1].flatten()
            zeroed, layer = whole.get_submodule(member.name), small.get_submodule(member.name)
            assert isinstance(zeroed, nn.Linear)
            assert isinstance(layer, nn.Linear)
            with torch.no_grad():
                zeroed.weight = nn.Parameter(zeroed.weight.index_fill(1, gone.to(zeroed.weight.device), 0))
                stay = complement(layer.in_features, gone)
                select_inputs(layer, stay)
                layer.weight = nn.Parameter(layer.weight.index_select(1, stay.to(layer.weight.device)))
                layer.in_features = len(stay)
        try:
            with torch.no_grad():
                torch.manual_seed(_SEED)
                outputs = output_tensors(whole(*call.args, **call.kwargs))
                torch.manual_seed(_SEED)
                others = output_tensors(small(*call.args, **call.kwargs))
        except Exception as error:
            failed[group.name] = f"the network does not run without some of its features ({_first_line(error)})"
            continue
        tolerance = max(_TOLERANCE.get(tensor.dtype, 1e-1) for tensor in [*outputs, torch.zeros(0)])
        if any(a.shape != b.shape or not _close(a, b, tolerance) for a, b in zip(outputs, others, strict=True)):
            failed[group.name] = "without some of its features the output is not what it is with them zeroed"
    return [group for group in groups if group.name not in failed], failed


def _sharing(groups: Sequence[Group]) -> list[Group]:
    count: dict[Any, int] = {}
    for group in groups:
        for member in group.producers + group.carriers:
            count[member.axis] = count.get(member.axis, 0) + 1
    return [g for g in groups if any(count[member.axis] > 1 for member in g.producers + g.carriers)]


class _Trial:
    """The network with random weights, which cannot hide a mistake as zero-initialised ones do."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model = model
        self.call = call
        self.layers = {module: name for name, module in model.named_modules() if not list(module.children())}
        self.canonical = {id(tensor): name for name, tensor in _named_tensors(model, duplicates=False)}
        self.places = {
            f"{path}.{own}".lstrip("."): self.canonical[id(tensor)]
            for path, module in model.named_modules()
            for own, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        """Where a module keeps a tensor, once for each module: its canonical name."""
        metal = any(tensor.device.type == "mps" for _, tensor in _named_tensors(model, duplicates=False))
        # Some networks insist on single precision somewhere in their forward; some overflow with random weights.
        self.usable = any(
            self._try(dtype, random)
            for random in (True, False)
            for dtype in ((torch.float32,) if metal else (torch.float64, torch.float32))
        )

    def _try(self, dtype: torch.dtype, random: bool) -> bool:
        self._use(dtype, random)
        try:
            return all(bool(tensor.isfinite().all()) for tensor in self.run({})[_OUTPUT])
        except Exception:
            return False

    def _use(self, dtype: torch.dtype, random: bool) -> None:
        self.tolerance = _TOLERANCE[dtype]
        generator = torch.Generator().manual_seed(_SEED)
        norms = {id(b) for m in self.model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
        self.state = {}
        for name, tensor in _named_tensors(self.model, duplicates=False):
            if not tensor.is_floating_point():
                continue
            if random and (isinstance(tensor, nn.Parameter) or id(tensor) in norms):
                self.state[name] = _random_like(tensor, generator, dtype)
            else:
                self.state[name] = tensor.to(dtype)

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            constant = random and bool((value == value.flatten()[:1]).all())
            values = torch.randn(value.shape, generator=generator).to(value.device) if constant else value
            return values.to(dtype)

        self.inputs = tree_map(convert, (self.call.args, self.call.kwargs))

    def search(self, groups: Sequence[Group], amount: float, failed: dict[str, str]) -> None:
        """Find by halving which of the groups fail."""
        stop_if_interrupted()
        why = self.fault(groups, amount) if groups else None
        if why is None:
            return
        if len(groups) == 1:
            failed[groups[0].name] = why
            return
        half = len(groups) // 2
        self.search(groups[:half], amount, failed)
        self.search(groups[half:], amount, failed)

    def fault(self, groups: Sequence[Group], amount: float) -> str | None:
        """What goes wrong when units of each of these groups go (0: one, 1: all but one); None if nothing does."""
        if not self.usable:
            return "the network's output on example_inputs is not finite, so nothing can be verified"
        generator = torch.Generator().manual_seed(_SEED)
        chosen: list[tuple[Group, Tensor]] = []
        for group in groups:
            count = 1 + int(amount * (group.size - 2))
            chosen.append((group, torch.randperm(group.size, generator=generator)[:count].sort().values))
        with _zeroed(chosen):
            whole = self.run({})
        cuts = plan_cuts(chosen)
        tensors = dict(_named_tensors(self.model, duplicates=True))
        state = {}
        for name, dims in cuts.tensors.items():
            key = self.canonical[id(tensors[name])]
            state[key] = cut(self.state[key], dims)
        try:
            with _attributes(self.model, cuts.attributes):
                small = self.run(state)
        except Exception as error:
            return f"the network does not run without some of its channels ({_first_line(error)})"
        return self._difference(whole, small)

    def run(self, state: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """Outputs of the network and of every layer, by name."""
        seen: dict[str, list[Tensor]] = {}

        def record(module: nn.Module, _: Any, output: Any) -> None:
            seen.setdefault(self.layers[module], []).extend(output_tensors(output))

        handles = [module.register_forward_hook(record) for module in self.layers]
        args, kwargs = self.inputs
        torch.manual_seed(_SEED)
        try:
            with torch.no_grad():
                used = self.state | state
                used = {place: used[name] for place, name in self.places.items() if name in used}
                # Ties are in the places already: functional_call's own would not put back a module with two names.
                output = functional_call(self.model, used, args, kwargs, tie_weights=False)
        finally:
            for handle in handles:
                handle.remove()
        seen[_OUTPUT] = output_tensors(output)
        return seen

    def _difference(self, whole: dict[str, list[Tensor]], small: dict[str, list[Tensor]]) -> str | None:
        # A layer that lost channels has another shape and says nothing; all others must agree, so that an output
        # that saturates does not hide a mistake.
        for name, tensors in whole.items():
            for one, other in zip(tensors, small.get(name, []), strict=False):
                if one.shape != other.shape:
                    if name == _OUTPUT:
                        return f"the network's output changes its shape {tuple(one.shape)} without some of its channels"
                elif not _close(one, other, self.tolerance):
                    return f"without some of its channels {name} is not what it is with them zeroed at their readers"
        return None


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point() or not one.numel():
        return True
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale, equal_nan=True)


@contextmanager
def _zeroed(chosen: Sequence[tuple[Group, Tensor]]) -> Iterator[None]:
    """The network with these units zeroed where they are read."""
    columns: dict[nn.Module, list[Tensor]] = {}
    for group, units in chosen:
        for member in group.consumers:
            columns.setdefault(member.module, []).append(member.index[units].flatten())

    def zero(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (zero_channels(module, inputs[0], torch.cat(columns[module])), *inputs[1:])

    with hooked(columns, zero):
        yield


def zero_channels(module: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
    """The input of a linear or convolutional layer with some of its channels zeroed."""
    # Counted from the end, since the batch dimension may be missing.
    dim = -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
    return tensor.index_fill(dim, channels.to(tensor.device), 0)


@contextmanager
def _attributes(model: nn.Module, attributes: dict[str, dict[str, int]]) -> Iterator[None]:
    before = [
        (module, name, getattr(module, name), value)
        for module, values in ((model.get_submodule(key), values) for key, values in attributes.items())
        for name, value in values.items()
    ]
    try:
        for module, name, _, value in before:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value, _ in before:
            setattr(module, name, value)


def _random_like(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Weights that keep signals at their size; vectors (scales, variances, biases) positive, so that units live."""
    if tensor.ndim < 2:
        values = 0.5 + torch.rand(tensor.shape, generator=generator, dtype=dtype)
    else:
        fan_in = max(1, tensor.numel() // tensor.shape[0])
        values = torch.randn(tensor.shape, generator=generator, dtype=dtype) / fan_in**0.5
    return values.to(tensor.device)


def _named_tensors(model: nn.Module, duplicates: bool) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=not duplicates)
    yield from model.named_buffers(remove_duplicate=not duplicates)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
