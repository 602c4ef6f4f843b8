"""A network without some channels beside the network with them zeroed where they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from rlsprune.graph.cuts import plan_cuts
from rlsprune.graph.groups import Group
from rlsprune.graph.layers import axis_of, join
from rlsprune.graph.observe import Call, hooked
from rlsprune.model.calls import output_tensors
from rlsprune.model.sizes import write_sizes
from rlsprune.model.tensors import complement

__all__ = ["CutTrial", "Mismatch", "first_line", "zero_channels"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_SEED = 0
_OUTPUT = "the network's output"


@dataclass
class Mismatch:
    """What went wrong, and in which layer first."""

    why: str
    layer: nn.Module | None = None


class CutTrial:
    """The network with random weights, which cannot hide a mistake as zero-initialised ones do."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model = model
        self.runs = 0
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
        self.obstacle: str | None = None
        for random in (True, False):
            for dtype in (torch.float32,) if metal else (torch.float64, torch.float32):
                self._use(call, dtype, random)
                self.obstacle = self._obstacle()
                if self.obstacle is None:
                    return

    def _obstacle(self) -> str | None:
        """Why nothing can be verified with the present weights; None if it can."""
        try:
            seen = self.run({})
            finite = all(bool(tensor.isfinite().all()) for tensor in seen[_OUTPUT])
            self._difference(seen, seen, "channels")  # sparse outputs, say, cannot be compared
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"the network does not run a second time, so nothing can be verified ({first_line(error)})"
        if not finite:
            return "the network's output on example_inputs is not finite, so nothing can be verified"
        return None

    def _use(self, call: Call, dtype: torch.dtype, random: bool) -> None:
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

        self.inputs = tree_map(convert, (call.args, call.kwargs))

    def fault(self, groups: Sequence[Group], amount: float) -> Mismatch | None:
        """What goes wrong when units of each of these groups go (0: one, 1: all but one); None if nothing does."""
        if self.obstacle is not None:
            return Mismatch(self.obstacle)
        generator = torch.Generator().manual_seed(_SEED)
        chosen: list[tuple[Group, Tensor]] = []
        for group in groups:
            count = 1 + int(amount * (group.size - 2))
            # An odd number stays where more than one could.
            count += 1 if 1 < count < group.size - 1 and (group.size - count) % 2 == 0 else 0
            chosen.append((group, torch.randperm(group.size, generator=generator)[:count].sort().values))
        cuts = plan_cuts(chosen)
        tensors = dict(_named_tensors(self.model, duplicates=True))
        state = {}
        for name in cuts.tensors:
            key = self.canonical[id(tensors[name])]
            state[key] = cuts.cut(name, self.state[key])
        what = "features" if all(group.is_input for group in groups) else "channels"
        inputs = [(group, units) for group, units in chosen if group.is_input]
        entered: list[nn.Module] = []
        try:
            with _at_readers(chosen, zero_channels):
                whole = self.run(self._without_products(chosen))
            with (
                _attributes(self.model, cuts.attributes),
                _at_readers(inputs, _without_channels),
                hooked(self.layers, lambda module, _: entered.append(module)),
            ):
                small = self.run(state)
        except torch.OutOfMemoryError:
            raise  # the machine's limits say nothing about the network
        except Exception as error:
            why = f"the network does not run without some of its {what} ({first_line(error)})"
            return Mismatch(why, entered[-1] if entered else None)
        return self._difference(whole, small, what)

    def _without_products(self, chosen: Sequence[tuple[Group, Tensor]]) -> dict[str, Tensor]:
        """Tensors with channels zeroed that no other layer reads: queries, by keys alone, and states, by their own."""
        state: dict[str, Tensor] = {}
        for member, units in [(m, units) for group, units in chosen for m in group.producers]:
            for slab in axis_of(member.module, "out").slabs if isinstance(member.module, nn.RNNBase) else ():
                if slab.dim == 1:
                    name = self.places[join(member.name, slab.tensor)]
                    whole = state.get(name, self.state[name])
                    own = slab.entries(member.index[units].flatten(), whole.shape[1])
                    state[name] = _zeroed(whole, 1, own)
        for member, units in [(m, units) for g, units in chosen if g.products for m in g.carriers]:
            if member.dim is not None:
                name = self.places[member.name]
                state[name] = _zeroed(self.state[name], member.dim, member.index[units].flatten())
        zeroed = [(member, member.index[units].flatten()) for group, units in chosen for member, _ in group.products]
        for member, channels in zeroed:
            for slab in axis_of(member.module, member.side).slabs:
                tensor = member.module._parameters.get(slab.tensor)
                if tensor is not None:
                    name = self.canonical[id(tensor)]
                    own = slab.entries(channels, tensor.shape[slab.dim])
                    state[name] = _zeroed(state.get(name, self.state[name]), slab.dim, own)
        return state

    def run(self, state: dict[str, Tensor]) -> dict[nn.Module | str, list[Tensor]]:
        """Outputs of every layer and of the network."""
        self.runs += 1
        seen: dict[nn.Module | str, list[Tensor]] = {}

        def record(module: nn.Module, _: Any, output: Any) -> None:
            seen.setdefault(module, []).extend(output_tensors(output))

        handles = [module.register_forward_hook(record) for module in self.layers]
        recurrent = [(m, m._flat_weights) for m in self.layers if isinstance(m, nn.RNNBase)]
        handles += [module.register_forward_pre_hook(_use_own_weights) for module, _ in recurrent]
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
            for module, weights in recurrent:
                module._flat_weights = weights
        seen[_OUTPUT] = output_tensors(output)
        return seen

    def _difference(
        self, whole: dict[nn.Module | str, list[Tensor]], small: dict[nn.Module | str, list[Tensor]], what: str
    ) -> Mismatch | None:
        # A layer that lost channels has another shape and says nothing; all others must agree, so that an output
        # that saturates does not hide a mistake.
        for layer, tensors in whole.items():
            for one, other in zip(tensors, small.get(layer, []), strict=False):
                if one.shape != other.shape:
                    if layer == _OUTPUT:
                        shape = tuple(one.shape)
                        return Mismatch(f"the network's output changes its shape {shape} without some of its {what}")
                elif not _close(one, other, self.tolerance):
                    where = layer if isinstance(layer, nn.Module) else None
                    name = self.layers[where] if where is not None else _OUTPUT
                    return Mismatch(
                        f"without some of its {what} {name} is not what it is with them zeroed at their readers", where
                    )
        return None


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point() or not one.numel():
        return True
    scale = float(one.abs().max())
    if math.isfinite(scale):
        return float((one - other).abs_().max()) <= tolerance * scale
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale, equal_nan=True)


@contextmanager
def _at_readers(
    chosen: Sequence[tuple[Group, Tensor]], change: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """The network with the inputs of the layers that read these units changed."""
    columns: dict[nn.Module, list[Tensor]] = {}
    for group, units in chosen:
        for member in group.consumers:
            columns.setdefault(member.module, []).append(member.index[units].flatten())

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(module, inputs[0], torch.cat(columns[module])), *inputs[1:])

    with hooked(columns, before):
        yield


def zero_channels(module: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
    """The input of a linear or convolutional layer with some of its channels zeroed."""
    return _zeroed(tensor, _channel_dim(module), channels)


def _zeroed(tensor: Tensor, dim: int, entries: Tensor) -> Tensor:
    return tensor.index_fill(dim, entries.to(tensor.device), 0)


def _without_channels(module: nn.Module, tensor: Tensor, channels: Tensor) -> Tensor:
    dim = _channel_dim(module)
    return tensor.index_select(dim, complement(tensor.shape[dim], channels.to(tensor.device)))


def _channel_dim(module: nn.Module) -> int:
    # Counted from the end, since the batch dimension may be missing.
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1


@contextmanager
def _attributes(model: nn.Module, attributes: dict[str, dict[str, int]]) -> Iterator[None]:
    changed = [(model.get_submodule(name), values) for name, values in attributes.items()]
    before = [(module, type(module), {name: vars(module)[name] for name in values if name in vars(module)})
              for module, values in changed]  # fmt: skip
    try:
        for module, values in changed:
            write_sizes(module, values)
        yield
    finally:
        for module, kind, own in before:
            module.__class__ = kind
            for name, value in own.items():
                setattr(module, name, value)


def _use_own_weights(module: nn.Module, _: Any) -> None:
    """A recurrent layer keeps its weights in a list, too, which functional_call does not change."""
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]


def _random_like(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Weights that keep signals at their size; vectors (scales, variances, biases) positive, so that units live."""
    values = torch.rand(tensor.shape, generator=generator, dtype=dtype)
    if tensor.ndim < 2:
        values += 0.5
    else:
        fan_in = max(1, tensor.numel() // tensor.shape[0])
        values = values.sub_(0.5).mul_((12 / fan_in) ** 0.5)
    return values.to(tensor.device)


def _named_tensors(model: nn.Module, duplicates: bool) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=not duplicates)
    yield from model.named_buffers(remove_duplicate=not duplicates)


def first_line(error: Exception) -> str:
    """What kind of error it is, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
