"""The pruning half of Algorithm 1: equations (26)-(30), section 3.2 and the gate, in float64 and by plain loops.

For networks that are a chain of convolutions, pools, a flatten and fully-connected layers. What is pruned at layer l
are its *inputs*: the channels (nodes) that layer l-1 produces, or the features of the data for l = 1.
Positions in the chain count from 0 here, so the paper's layer l is position l-1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from .training import ReferenceRLS, to_paper

Kind = Literal["conv", "fc"]
Chain = Sequence[tuple[Kind, str]]
"""Kind and name of every layer with weights, from the input to the output; pools and flattens need no entry."""
Criterion = Literal["rls", "rls-paper"]


@dataclass
class State:
    """A network and its optimizer as plain tensors by layer name, in torch's (outputs, inputs, ...) layout.

    P has a row per input (convolution: channel, then filter position) and, if the layer has a bias, one more at the
    end. `kept_inputs` are the indices of the data's features that are still there, None for images.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor | None]
    P: dict[str, Tensor]
    velocities: dict[str, Tensor] = field(default_factory=dict)
    bias_velocities: dict[str, Tensor | None] = field(default_factory=dict)
    kept_inputs: list[int] | None = None


def cut(ratio: float, n: int) -> int:
    """The size of Cut_ξ: ⌊ξ·n⌋ of the real product (0.29·100 is 29, though not in floating point)."""
    return math.floor(ratio * n + 1e-9)


def rows_of_units(state: State, chain: Chain, position: int) -> list[list[int]]:
    """For each unit that can be pruned at a layer's input, the rows of P (and columns of W) that belong to it."""
    kind, name = chain[position]
    weight = state.weights[name]
    if kind == "conv":
        if position > 0 and chain[position - 1][0] != "conv":
            raise ValueError(f"layer {name!r}: a convolution behind a fully-connected layer")
        channels, size = weight.shape[1], weight[0, 0].numel()  # C_{l-1} and H_l W_l
    elif position > 0 and chain[position - 1][0] == "conv":
        channels = len(state.weights[chain[position - 1][1]])
        size, rest = divmod(weight.shape[1], channels)  # the flatten puts a whole map side by side
        if rest:
            raise ValueError(f"layer {name!r}: {weight.shape[1]} inputs do not come from {channels} channels")
    else:
        channels, size = weight.shape[1], 1
    if position > 0 and channels != len(state.weights[chain[position - 1][1]]):
        raise ValueError(f"layer {name!r} takes {channels} channels, the layer before makes another number (groups?)")
    return [list(range(c * size, (c + 1) * size)) for c in range(channels)]


def row_sums(P: Tensor, inputs: int) -> list[float]:
    """The inner sum of eq. (26), signed, for each input; the bias has neither a row nor a column in it."""
    return [P[i, :inputs].sum().item() for i in range(inputs)]


def scores_from_inverse(P: Tensor, units: list[list[int]]) -> list[float]:
    """Eq. (26): s_P of each unit, the row sums of P summed over the unit's rows. Large means unimportant."""
    sums = row_sums(P, sum(len(rows) for rows in units))
    return [sum(sums[row] for row in rows) for rows in units]


def scores_from_weights(producer: Tensor) -> list[float]:
    """Eq. (27): s_W of each channel, the L1 norm of the weights that produce it. Small means unimportant."""
    return [producer[i].abs().sum().item() for i in range(len(producer))]


def sort_descending(scores: list[float]) -> list[int]:
    """Eq. (28): k_P, the unimportant first; among equals the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def sort_ascending(scores: list[float]) -> list[int]:
    """Eq. (29): k_W, the unimportant first; among equals the lower index."""
    return sorted(range(len(scores)), key=lambda i: (scores[i], i))


def choose(
    state: State,
    chain: Chain,
    position: int,
    ratio: float,
    *,
    input_ratio: float | None = None,
    criterion: Criterion = "rls",
    min_channels: int = 1,
    statistics: Mapping[str, Tensor] | None = None,
) -> list[int]:
    """Eq. (30): the units to prune at the input of one layer, in ascending order.

    Args:
        state: the network as it is now: the layers before `position` are already pruned.
        chain: the layers.
        position: which of them.
        ratio: ξ.
        input_ratio: the ratio for the network's flat input features; None for ξ/2.
        criterion: for a fully-connected layer behind a convolution, "rls-paper" sorts nodes and deletes a channel if
            any of its nodes is in the intersection (section 3.2), "rls" sorts channels. Elsewhere they are the same.
        min_channels: how many units stay at least. If the intersection would leave fewer, those of it that are
            most unimportant by P go.
        statistics: P to score with, by layer name; None for the state's own.
    """
    kind, name = chain[position]
    P = state.P[name] if statistics is None else statistics[name]
    units = rows_of_units(state, chain, position)
    if position == 0:
        if kind == "conv":  # the colours of an image
            return []
        k_P = sort_descending(scores_from_inverse(P, units))
        doomed = k_P[: cut(ratio / 2 if input_ratio is None else input_ratio, len(units))]
    else:
        channel_norms = scores_from_weights(state.weights[chain[position - 1][1]])
        behind_conv = kind == "fc" and chain[position - 1][0] == "conv"
        if behind_conv and criterion == "rls-paper":
            channel_of = [channel for channel, rows in enumerate(units) for _ in rows]
            nodes = len(channel_of)
            k_P = sort_descending(row_sums(P, nodes))
            k_W = sort_ascending([channel_norms[channel] for channel in channel_of])
            in_both = intersection(k_P, k_W, cut(ratio, nodes))
            doomed = list(dict.fromkeys(channel_of[node] for node in in_both))
        else:
            k_P = sort_descending(scores_from_inverse(P, units))
            k_W = sort_ascending(channel_norms)
            doomed = intersection(k_P, k_W, cut(ratio, len(units)))
    return sorted(doomed[: max(0, len(units) - min_channels)])


def intersection(k_P: list[int], k_W: list[int], count: int) -> list[int]:
    """Cut_ξ(k_P) ∩ Cut_ξ(k_W), in the order of k_P."""
    return [i for i in k_P[:count] if i in k_W[:count]]


def sliced_inverse(P: Tensor, kept: list[int]) -> Tensor:
    """P with the rows and columns that stay."""
    return P[kept][:, kept].clone()


def schur_inverse(P: Tensor, kept: list[int]) -> Tensor:
    """The inverse of what stays of the autocorrelation A = P⁻¹."""
    A = torch.linalg.inv(P)
    return torch.linalg.inv(A[kept][:, kept])


def initial_inverse(P: Tensor, kept: list[int]) -> Tensor:
    """P as before the first step, p0 = 1."""
    return torch.eye(len(kept), dtype=P.dtype)


def refit(W: Tensor, P: Tensor, kept: list[int]) -> Tensor:
    """The weights on the kept rows that give the layer's old output best, in the least-squares sense.

    With x distributed so that E[x xᵀ] = A = P⁻¹, E|Wᵀx - Vᵀx_k|² is least where A_kk V = A_k: W.

    Args:
        W: (rows, outputs), the paper's layout, bias row last.
        P: (rows, rows).
        kept: the rows that stay, the bias row among them.
    """
    A = torch.linalg.inv(P)
    return torch.linalg.inv(A[kept][:, kept]) @ A[kept] @ W


def remove(
    state: State,
    chain: Chain,
    position: int,
    doomed: Sequence[int],
    *,
    inverse: Literal["slice", "schur", "reset"] = "slice",
    compensate: bool = False,
    statistics: Mapping[str, Tensor] | None = None,
) -> None:
    """Prune units at the input of one layer, in place: its columns, its P and Ψ, and the rows that produce them.

    Args:
        state: changed.
        chain: the layers.
        position: the layer whose inputs go.
        doomed: the units, as `choose` gives them.
        inverse: what happens to P.
        compensate: refit the layer's weights and bias on the inputs that stay.
        statistics: P to refit with, by layer name; None for the state's own.
    """
    name = chain[position][1]
    weight, bias = state.weights[name], state.biases[name]
    units = rows_of_units(state, chain, position)
    kept_units = [unit for unit in range(len(units)) if unit not in set(doomed)]
    kept = [row for unit in kept_units for row in units[unit]]
    kept_and_bias = kept if bias is None else [*kept, weight[0].numel()]

    W = weight.flatten(1).T
    if bias is not None:
        W = torch.cat([W, bias.reshape(1, -1)])
    if compensate:
        new_W = refit(W, state.P[name] if statistics is None else statistics[name], kept_and_bias)
    else:
        new_W = W[kept_and_bias]
    # A convolution loses whole channels; a fully-connected layer behind a flatten loses all nodes of a channel.
    inputs = len(kept_units) if weight.dim() > 2 else len(kept)
    shape = (len(weight), inputs, *weight.shape[2:])
    state.weights[name] = new_W[: len(kept)].T.reshape(shape).clone()
    if bias is not None:
        state.biases[name] = new_W[-1].clone()
    if name in state.velocities:
        state.velocities[name] = state.velocities[name].flatten(1)[:, kept].reshape(shape).clone()
    inverses = {"slice": sliced_inverse, "schur": schur_inverse, "reset": initial_inverse}
    state.P[name] = inverses[inverse](state.P[name], kept_and_bias)

    if position == 0:
        before = state.kept_inputs if state.kept_inputs is not None else list(range(len(units)))
        state.kept_inputs = [before[unit] for unit in kept_units]
        return
    producer = chain[position - 1][1]
    for tensors in (state.weights, state.velocities):
        if producer in tensors:
            tensors[producer] = tensors[producer][kept_units].clone()
    for vectors in (state.biases, state.bias_velocities):
        vector = vectors.get(producer)
        if vector is not None:
            vectors[producer] = vector[kept_units].clone()


def prune(
    state: State,
    chain: Chain,
    ratio: float,
    *,
    input_ratio: float | None = None,
    criterion: Criterion = "rls",
    min_channels: int = 1,
    inverse: Literal["slice", "schur", "reset"] = "slice",
    compensate: bool = False,
    statistics: Mapping[str, Tensor] | None = None,
) -> dict[str, list[int]]:
    """One event of Algorithm 1: layers 1...L, each scored after the one before was pruned. Changes the state.

    The defaults are the paper's. The outputs of the last layer are nobody's inputs, so they stay.

    Returns:
        By layer name, the units that its *input* lost, counted in the layer as it was before the event.
    """
    removed = {}
    for position, (_, name) in enumerate(chain):
        doomed = choose(
            state,
            chain,
            position,
            ratio,
            input_ratio=input_ratio,
            criterion=criterion,
            min_channels=min_channels,
            statistics=statistics,
        )
        if doomed:
            remove(state, chain, position, doomed, inverse=inverse, compensate=compensate, statistics=statistics)
        removed[name] = doomed
    return removed


class Gate:
    """When Algorithm 1 prunes: after q epochs, at the end of an epoch whose loss is below the recorded one."""

    def __init__(self, warmup_epochs: int) -> None:
        self.warmup_epochs = warmup_epochs  # q
        self.epoch = 0
        self.recorded = math.inf  # the paper's 10⁵

    def step(self, loss: float) -> bool:
        """Count an epoch; True if the network is to be pruned now, which also records the loss."""
        self.epoch += 1
        if self.epoch > self.warmup_epochs and loss < self.recorded:
            self.recorded = loss
            return True
        return False


def snapshot(reference: ReferenceRLS, kept_inputs: list[int] | None = None) -> tuple[State, list[tuple[Kind, str]]]:
    """Copy a chain in training out of its optimizer. Its modules must be registered in the order they run."""
    state = State({}, {}, {}, kept_inputs=kept_inputs)
    chain: list[tuple[Kind, str]] = []
    for name, layer in reference.layers.items():
        chain.append(("fc" if isinstance(layer, nn.Linear) else "conv", name))
        state.weights[name] = layer.weight.detach().clone()
        state.biases[name] = None if layer.bias is None else layer.bias.detach().clone()
        state.P[name] = reference.P[name].clone()
        state.velocities[name], state.bias_velocities[name] = reference.velocity(name)
    return state, chain


def install(state: State, reference: ReferenceRLS) -> None:
    """Put a state back: the optimizer's modules get new Parameters of the pruned shapes, and training goes on.

    The model now takes only `state.kept_inputs` of the data's features.
    """
    for name, layer in reference.layers.items():
        weight, bias = state.weights[name], state.biases[name]
        layer.weight = nn.Parameter(weight.clone())
        if bias is not None:
            layer.bias = nn.Parameter(bias.clone())
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = weight.shape
        else:
            layer.out_channels, layer.in_channels = weight.shape[:2]
        reference.P[name] = state.P[name].clone()
        reference.Psi[name] = to_paper(layer, state.velocities[name], state.bias_velocities[name])
