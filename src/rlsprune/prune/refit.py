"""The refit of a layer that loses inputs, and the cut of its P."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.graph import Cuts, Group
from rlsprune.graph.layers import is_depthwise
from rlsprune.model.tensors import complement, memory_format, replace_data
from rlsprune.optim.entries import Form, form_of, of_groups, renewed
from rlsprune.optim.factored import Factored
from rlsprune.optim.layers import Layer
from rlsprune.optim.packing import INVERSE
from rlsprune.optim.whole import whole_entry
from rlsprune.prune.criteria import InverseOf
from rlsprune.statistics.inverse import DenseInverse, Inverse, Removal, inverses_of
from rlsprune.statistics.rows import has_rows, input_rows, split_matrix, weight_matrix


class KnownInverses:
    """P of each layer during one event: computed once, then cut with every group that is removed.

    Args:
        source: A function that returns the P of a layer's inputs before the event, given the layer's name.
        keep: Whether to keep the P of layers whose groups are all done, because it will be needed again.
    """

    def __init__(self, source: InverseOf, *, keep: bool = False) -> None:
        self._source, self._keep = source, keep
        self._known: dict[str, list[Inverse]] = {}
        self._removals: dict[str, list[Removal[Inverse]]] = {}

    def __call__(self, name: str) -> list[Inverse]:
        """Returns P of each group of a layer, for the inputs that it still has."""
        if name in self._removals:
            self._known[name] = [removal.left() for removal in self._removals.pop(name)]
        if name not in self._known:
            self._known[name] = self._source(name)
        return self._known[name]

    def forget(self, name: str) -> None:
        """Drops the P of a layer when all groups that it reads are done, unless P is to be kept."""
        if not self._keep:
            self._known.pop(name, None)
            self._removals.pop(name, None)

    def remove(self, group: Group, units: list[int], ask: bool) -> Mapping[str, list[Removal[Inverse]]]:
        """Cuts the known P before these units are removed.

        Args:
            group: The group of the units.
            units: The units that go.
            ask: Whether to compute the P of every layer that reads them, and not only cut those that are known.

        Returns:
            Name of a layer → the removal of the inputs from the P of each of its groups.
        """
        found = {}
        for member in group.consumers:
            if has_rows(member.module) and (ask or member.name in self._known):
                gone = input_rows(member.module, member.index[units]).flatten(1)
                found[member.name] = [P.without(rows) for P, rows in zip(self(member.name), gone, strict=True)]
        self._removals |= found
        return found


def compensate(model: nn.Module, group: Group, removals: Mapping[str, list[Removal[Inverse]]]) -> None:
    """Refits every consumer by ``W_k ← W_k − P_kd P_dd⁻¹ W_d``, bias included. Leaves the weights of units that go.

    It is the least-squares refit of the layer's output on the inputs that stay. It makes new tensors and leaves the old
    ones intact.

    Args:
        model: The network, or a copy of it with the same names.
        group: The group whose units go.
        removals: Name of a layer that reads them → the removal of the inputs from the P of each of its groups.
    """
    # A weight that also makes the units (tied to an embedding, say) cannot be refitted only for reading them. A weight
    # that several layers read them with is refitted once, for the inputs of all of them.
    done = {id(member.module._parameters.get("weight")) for member in group.producers}
    for member in group.consumers:
        if not has_rows(member.module) or id(member.module.weight) in done:
            continue
        done.add(id(member.module.weight))
        layer = model.get_submodule(member.name)
        assert has_rows(layer)
        refit_layer(layer, removals[member.name])


def refit_layer(layer: Layer, removals: Sequence[Removal[Inverse]]) -> None:
    """Refits one layer by ``W_k ← W_k − P_kd P_dd⁻¹ W_d``, bias included, for each of its groups, in new tensors."""
    pairs = zip(weight_matrix(layer), removals, strict=True)
    refitted = [W.index_copy(0, one.stay.to(W.device), one.refit(W)) for W, one in pairs]
    weight, bias = split_matrix(layer, refitted[0].unsqueeze(0) if len(refitted) == 1 else torch.stack(refitted))
    for parameter, data in ((layer.weight, weight), (layer.bias, bias)):
        if parameter is not None and data is not None:
            replace_data(parameter, data.contiguous(memory_format=memory_format(parameter)))


def cut_inverses(
    model: nn.Module, optimizer: Optimizer, cuts: Cuts, how: str, removals: Mapping[str, list[Removal[Inverse]]]
) -> None:
    """Cuts the P that `rlsprune.RLS` keeps of every layer in the plan, before the plan is applied.

    Args:
        model: The network, not cut yet.
        optimizer: The optimizer, which keeps its state as it is if it has no P.
        cuts: The plan.
        how: ``"schur"``: the inverse autocorrelation of the inputs that stay. ``"slice"``: their rows and columns of P.
            ``"reset"``: p0·I, as before the first step.
        removals: Name of a layer → removals of these inputs from this P that are already computed.
    """
    done: set[int] = set()
    for name, dims in cuts.tensors.items():
        path, _, own = name.rpartition(".")
        if own != "weight":
            continue
        layer = model.get_submodule(path)
        weight = layer._parameters.get("weight")
        if weight is None or INVERSE not in optimizer.state.get(weight, {}) or id(weight) in done:
            continue
        done.add(id(weight))
        state = optimizer.state[weight]
        form, depthwise = form_of(state[INVERSE]), is_depthwise(layer)
        if not depthwise and 1 not in dims:
            continue
        groups, inputs = form.like.shape[::2]
        taps = math.prod(weight.shape[2:])
        gone = torch.empty(0, dtype=torch.long) if depthwise else complement(weight.shape[1], dims[1])
        rows = (gone[:, None] * taps + torch.arange(taps)).flatten()
        if how == "reset":
            p0 = next(group["p0"] for group in optimizer.param_groups if any(p is weight for p in group["params"]))
            state[INVERSE] = renewed(state[INVERSE], (len(dims[0]) if depthwise else groups, inputs - len(rows)), p0)
        elif depthwise:
            state[INVERSE] = of_groups(state[INVERSE], dims[0].to(weight.device))
        else:
            state[INVERSE] = _without(form, rows.expand(groups, -1), how, removals.get(path, ()))


def _without(form: Form, gone: Tensor, how: str, known: Sequence[Removal[Inverse]]) -> dict[str, Any]:
    """Returns the optimizer's entry of P without the inputs ``(groups, m)``."""
    if how == "slice":
        return form.sliced(gone)
    if isinstance(form, Factored):
        return form.without(gone)
    removals = known or [P.without(rows) for P, rows in zip(inverses_of(form), gone, strict=True)]
    left = [removal.left() for removal in removals]
    return whole_entry([inverse.P for inverse in left if isinstance(inverse, DenseInverse)])
