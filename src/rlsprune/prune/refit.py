"""What a layer does when some of its inputs go: refit its weights, and let its P go along."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune._tensors import complement, memory_format
from rlsprune.graph import Cuts, Group
from rlsprune.graph.layers import is_depthwise
from rlsprune.optim.inverse import DenseInverse, Inverse
from rlsprune.optim.layers import is_layer
from rlsprune.optim.rows import input_rows, split_matrix, weight_matrix
from rlsprune.optim.state import INVERSE
from rlsprune.prune.criteria import InverseOf
from rlsprune.prune.surgery import replace_data


def compensate(model: nn.Module, group: Group, units: list[int], inverse_of: InverseOf) -> None:
    """``W_k ← W_k − P_kd P_dd⁻¹ W_d`` on every consumer, bias included; the weights of what goes are left as they are.

    The least-squares refit of the layer's output on the inputs that stay. In new tensors: the old ones are intact.

    Args:
        model: The network, or a copy of it with the same names.
        group: Whose units go.
        units: Which of them.
        inverse_of: P of each group of a layer.
    """
    # A weight that also makes the units (tied to an embedding, say) cannot be refitted for reading them alone; one that
    # several layers read them with is refitted once, for the inputs of all.
    done = {id(member.module._parameters.get("weight")) for member in group.producers}
    for member in group.consumers:
        if not is_layer(member.module) or id(member.module.weight) in done:
            continue
        done.add(id(member.module.weight))
        layer = model.get_submodule(member.name)
        assert is_layer(layer)
        matrix = weight_matrix(layer)
        gone = input_rows(member.module, member.index[units]).flatten(1).to(matrix.device)
        for W, P, rows in zip(matrix, inverse_of(member.name), gone, strict=True):
            W[complement(len(W), rows)] = P.refit(W.clone(), rows)
        weight, bias = split_matrix(layer, matrix)
        for parameter, data in ((layer.weight, weight), (layer.bias, bias)):
            if parameter is not None and data is not None:
                replace_data(parameter, data.contiguous(memory_format=memory_format(parameter)))


class KnownInverses:
    """P of each layer during one event: computed once, and smaller with every group that goes."""

    def __init__(self, source: InverseOf) -> None:
        self._source = source
        self._known: dict[str, list[Inverse]] = {}
        self._gone: dict[str, list[Tensor]] = {}

    def __call__(self, name: str) -> list[Inverse]:
        """P of each group of a layer, for the inputs that it still has."""
        if name not in self._known:
            self._known[name] = self._source(name)
        for gone in self._gone.pop(name, ()):
            self._known[name] = [P.without(rows) for P, rows in zip(self._known[name], gone, strict=True)]
        return self._known[name]

    def remove(self, group: Group, units: list[int]) -> None:
        """These inputs are about to go: their rows go from every P known so far when it is asked for again."""
        for member in group.consumers:
            if member.name in self._known:
                gone = input_rows(member.module, member.index[units]).flatten(1)
                self._gone.setdefault(member.name, []).append(gone)


def cut_inverses(model: nn.Module, optimizer: Optimizer, cuts: Cuts, how: str) -> None:
    """Cuts the P that :class:`rlsprune.RLS` keeps of every layer in the plan, before the plan is applied.

    Args:
        model: The network, not cut yet.
        optimizer: Any optimizer; those without P are left alone.
        cuts: The plan.
        how: ``"schur"``: the inverse autocorrelation of the inputs that stay. ``"slice"``: their rows and columns of P.
    """
    done: set[int] = set()
    for name, dims in cuts.tensors.items():
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        weight = layer._parameters.get("weight")
        if own != "weight" or weight is None or INVERSE not in optimizer.state.get(weight, {}) or id(weight) in done:
            continue
        done.add(id(weight))
        state = optimizer.state[weight]
        if is_depthwise(layer):
            keep = dims[0].to(weight.device)
            state[INVERSE] = [P[keep] for P in state[INVERSE]]
        elif 1 in dims:
            taps = weight[0, 0].numel()
            gone = complement(weight.shape[1], dims[1])
            rows = (gone[:, None] * taps + torch.arange(taps)).flatten()
            state[INVERSE] = _without(state[INVERSE], rows, how)


def _without(blocks: list[Tensor], rows: Tensor, how: str) -> list[Tensor]:
    """P in diagonal blocks, each ``(groups, b, b)``, without some rows; a block that loses all of them goes."""
    result, start = [], 0
    for block in blocks:
        size = block.shape[-1]
        own = rows[(rows >= start) & (rows < start + size)] - start
        start += size
        if len(own) < size:
            result.append(torch.stack([_shrunk(P, own.to(P.device), how) for P in block]) if len(own) else block)
    return result


def _shrunk(P: Tensor, gone: Tensor, how: str) -> Tensor:
    if how == "slice":
        stay = complement(len(P), gone)
        return P[stay][:, stay]
    return DenseInverse(P).without(gone).P
