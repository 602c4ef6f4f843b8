"""Compares a network without some channels with the network in which they are zeroed where they are read."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from rlsprune.graph.cuts import Cuts, plan_cuts
from rlsprune.graph.groups import Group
from rlsprune.graph.layers import axis_of, join
from rlsprune.graph.observe import Call
from rlsprune.graph.parts import Parts
from rlsprune.graph.readers import at_readers, uncalled_readers, without_channels, zero_channels, zeroed
from rlsprune.graph.watch import LayerWatch
from rlsprune.model.calls import output_tensors
from rlsprune.model.sizes import write_sizes
from rlsprune.model.tensors import tensors_in

__all__ = ["CutTrial", "Mismatch", "first_line"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_SEED = 0
_OUTPUT = "the network's output"


@dataclass
class Mismatch:
    """A failed trial: what went wrong, and the first layer in which it did."""

    why: str
    layer: nn.Module | None = None
    raised: bool = False
    """Whether the network without the channels ended in an error."""


class CutTrial:
    """The network with random weights, which cannot hide a mistake as zero-initialised ones do."""

    def __init__(self, model: nn.Module, call: Call, watch: LayerWatch) -> None:
        self.model = model
        self._watch = watch
        self.runs = 0
        """Number of runs of the network as a whole."""
        self._parts = Parts(model)
        self._confirmed: set[tuple[type[nn.Module], str]] = set()
        """Kinds of parts, and errors in them, without numbers, that the network raised as well."""
        self.canonical: dict[int, str] = {}
        """Id of a parameter or buffer → the first of its names."""
        self.places: dict[str, str] = {}
        """Name of a tensor, one for each module that keeps it → its canonical name."""
        self._tensors: dict[str, Tensor] = {}
        self._spots: list[tuple[dict[str, Tensor | None], str, str]] = []
        for kind in ("_parameters", "_buffers"):
            for path, module in model.named_modules():
                own: dict[str, Tensor | None] = getattr(module, kind)
                for key, tensor in own.items():
                    if tensor is not None:
                        name = self.canonical.setdefault(id(tensor), join(path, key))
                        self.places[join(path, key)] = name
                        self._tensors.setdefault(name, tensor)
                        self._spots.append((own, key, name))
        self._recurrent = [module for module in watch.names if isinstance(module, nn.RNNBase)]
        devices = {tensor.device.type for tensor in (*self._tensors.values(), *tensors_in((call.args, call.kwargs)))}
        metal = "mps" in devices
        # Seeding the generators of devices that are not there takes longer than a small network.
        self._seed = torch.default_generator.manual_seed if devices <= {"cpu"} else torch.manual_seed
        # Some networks insist on single precision somewhere in their forward; some overflow with random weights.
        self.obstacle: str | None = None
        self.uncalled: set[nn.Module] = set()
        """Layers that are not called."""
        for random in (True, False):
            for dtype in (torch.float32,) if metal else (torch.float64, torch.float32):
                self._use(call, dtype, random)
                self.obstacle = self._obstacle()
                if self.obstacle is None:
                    return

    def _obstacle(self) -> str | None:
        """Returns why nothing can be verified with the present weights; None if it can."""
        try:
            with self._parts.recorded():
                seen = self.run({})
            self.uncalled = self._watch.names.keys() - seen.keys()
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
        self._last: dict[str, tuple[dict[int, Tensor] | None, Tensor]] = {}
        generator = torch.Generator().manual_seed(_SEED)
        norms = {id(buffer) for m in self._watch.names if isinstance(m, _NormBase) for buffer in m._buffers.values()}
        self.state = {}
        for name, tensor in self._tensors.items():
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

    def part_of(self, groups: Sequence[Group]) -> nn.Module | None:
        """Returns the innermost part of the network with all that these groups change, if it runs by itself."""
        return self._parts.around(groups)

    def fault_nearby(self, groups: Sequence[Group], amount: float, trusted: bool = False) -> Mismatch | None:
        """Returns the `fault` of a part of the network, where that can tell. That it finds none is no proof.

        An error is looked for in the network too, once: a part may need what only the network's own run prepares.

        Args:
            groups: Groups that lose units.
            amount: Share of their units, as in `fault`.
            trusted: Whether the network has raised an error where the part did, for a group like these.
        """
        part = self.part_of(groups)
        fault = self.fault(groups, amount, part)
        if part is None or fault is None:
            return fault
        error = (type(part), re.sub(r"\d+", "", fault.why))
        if fault.layer is not None and (trusted or not fault.raised or error in self._confirmed):
            return fault
        found = self.fault(groups, amount)
        if found is not None and found.raised:
            self._confirmed.add(error)
        return found

    def fault(self, groups: Sequence[Group], amount: float, part: nn.Module | None = None) -> Mismatch | None:
        """Returns what goes wrong when units of each of these groups go; None if nothing does.

        Args:
            groups: Groups that lose units.
            amount: Share of their units, from 0 (one) to 1 (all but one).
            part: Module that has all that changes in it, to be run in place of the network.
        """
        if self.obstacle is not None:
            return Mismatch(self.obstacle)
        chosen = [(group, _some_units(group, amount)) for group in groups]
        cuts = plan_cuts(chosen)
        state = {self.places[name]: self._cut(cuts, name) for name in cuts.tensors}
        what = "features" if all(group.is_input for group in groups) else "channels"
        inputs = [(group, units) for group, units in chosen if group.is_input]
        try:
            # The run that may raise an error comes first, since it raises early.
            with _attributes(self.model, cuts.attributes), at_readers(inputs, without_channels):
                small = self.run(state, part)
            with at_readers(chosen, zero_channels):
                whole = self.run(self._without_products(chosen), part)
        except torch.OutOfMemoryError:
            raise  # the machine's limits say nothing about the network
        except Exception as error:
            why = f"the network does not run without some of its {what} ({first_line(error)})"
            return Mismatch(why, self._watch.entered, raised=True)
        return self._difference(whole, small, what)

    def _cut(self, cuts: Cuts, name: str) -> Tensor:
        """Returns a tensor without what goes: that of the last trial, where it is the same."""
        dims = cuts.tensors[name]
        before, made = self._last.get(name, (None, None))
        if made is None or name in cuts.factors or not _same(dims, before):
            made = cuts.cut(name, self.state[self.places[name]])
            self._last[name] = (None if name in cuts.factors else dims, made)
        return made

    def _without_products(self, chosen: Sequence[tuple[Group, Tensor]]) -> dict[str, Tensor]:
        """Returns tensors with those channels zeroed that no layer is called with: queries and recurrent states.

        Only keys read queries, and only their own layer reads states. A reader that is not called, but whose weight a
        function uses, has the channels zeroed in its weight.
        """
        state: dict[str, Tensor] = {}
        for member, units in [(m, units) for group, units in chosen for m in group.producers]:
            for slab in axis_of(member.module, "out").slabs if isinstance(member.module, nn.RNNBase) else ():
                if slab.dim == 1:
                    name = self.places[join(member.name, slab.tensor)]
                    whole = state.get(name, self.state[name])
                    own = slab.entries(member.index[units].flatten(), whole.shape[1])
                    state[name] = zeroed(whole, 1, own)
        for member, units in [(m, units) for g, units in chosen if g.products for m in g.carriers]:
            if member.dim is not None:
                name = self.places[member.name]
                state[name] = zeroed(self.state[name], member.dim, member.index[units].flatten())
        members = [(member, units) for group, units in chosen for member, _ in group.products]
        members += [(m, units) for group, units in chosen for m in uncalled_readers(group, self.uncalled)]
        for member, channels in [(member, member.index[units].flatten()) for member, units in members]:
            for slab in axis_of(member.module, member.side).slabs:
                tensor = member.module._parameters.get(slab.tensor)
                if tensor is not None:
                    name = self.canonical[id(tensor)]
                    own = slab.entries(channels, tensor.shape[slab.dim])
                    state[name] = zeroed(state.get(name, self.state[name]), slab.dim, own)
        return state

    def run(self, state: dict[str, Tensor], part: nn.Module | None = None) -> dict[nn.Module | str, list[Tensor]]:
        """Runs the network, or one part of it; returns the outputs of every layer and of the whole."""
        self.runs += part is None
        module = self.model if part is None else part
        args, kwargs = self.inputs if part is None else self._parts.call_of(part)
        self._seed(_SEED)
        self._watch.begin()
        with torch.no_grad(), self._holding(self.state | state):
            output = module(*args, **kwargs)
        return {**self._watch.made, _OUTPUT: output_tensors(output)}

    @contextmanager
    def _holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Puts tensors, by their canonical names, in the places of the network's own, inside the block."""
        before = [(own, key, own[key]) for own, key, _ in self._spots]
        lists = [(module, module._flat_weights) for module in self._recurrent]
        try:
            for own, key, name in self._spots:
                if name in tensors:
                    own[key] = tensors[name]
            for module, _ in lists:  # a recurrent layer keeps its weights in a list, too
                module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]
            yield
        finally:
            for own, key, tensor in before:
                own[key] = tensor
            for module, weights in lists:
                module._flat_weights = weights

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
                    name = self._watch.names[where] if where is not None else _OUTPUT
                    return Mismatch(
                        f"without some of its {what}, {name} differs from what it is with them zeroed at their readers",
                        where,
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


def _some_units(group: Group, amount: float) -> Tensor:
    """Draws units of a group: the same in every trial, and others in every group."""
    seed = zlib.crc32(group.name.encode())
    count = 1 + int(amount * (group.size - 2))
    # An odd number stays where more than one could, different between groups: blocks may share a number of heads.
    count += 1 if 1 < count < group.size - 1 and (group.size - count) % 2 == 0 else 0
    count -= 2 * (seed % (1 + min(2, (count - 1) // 2))) if amount < 1 else 0
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(group.size, generator=generator)[:count].sort().values


def _same(one: Mapping[int, Tensor], other: Mapping[int, Tensor] | None) -> bool:
    return other is not None and one.keys() == other.keys() and all(torch.equal(one[dim], other[dim]) for dim in one)


def _random_like(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draws weights that keep signals at their size; vectors (scales, variances, biases) are positive: units live."""
    low, high = 0.5, 1.5
    if tensor.ndim > 1:
        high = (3 / max(1, tensor.numel() // tensor.shape[0])) ** 0.5
        low = -high
    return torch.empty(tensor.shape, dtype=dtype).uniform_(low, high, generator=generator).to(tensor.device)


def first_line(error: Exception) -> str:
    """Returns the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
