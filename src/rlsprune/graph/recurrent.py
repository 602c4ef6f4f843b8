"""Recurrent layers as a whole: their inputs, the states that they make, and those that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from rlsprune.graph.fields import Labelled, compact, merged, placed, tidy, varying
from rlsprune.graph.layers import sides
from rlsprune.graph.slots import Slots

__all__ = ["follow_recurrent"]


def follow_recurrent(
    module: nn.RNNBase,
    name: str,
    args: tuple[Any, ...],
    output: Any,
    slots: Slots,
    labels_of: Callable[[Any], Labelled],
) -> list[tuple[Tensor, Labelled]]:
    """Ties what a recurrent layer was called with to its channels.

    A state is read by the layer itself, through its own weights, so it goes with them. The states of all layers and
    directions are equally many: the same of each go together.

    Args:
        module: LSTM, GRU or plain RNN.
        name: Name of the module.
        args: Arguments of its call.
        output: Output of its call.
        slots: Slots, in which channels are tied.
        labels_of: Function that returns the labels of a tensor.

    Returns:
        The tensors that it made, and their channels.
    """
    read = slots.numbers((name, "in", None))
    for x in [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor) and leaf.is_floating_point()]:
        _tie(slots, labels_of(x).fields, placed(read, x.ndim - 1, x.shape), f"{name} reads it step by step")
    if "out" not in sides(module):
        return []
    states = slots.numbers((name, "out", None))
    if isinstance(args[0], PackedSequence):
        slots.keep(states, f"{name} makes packed sequences, which are not followed")
    ways = states.view(2 if module.bidirectional else 1, -1).repeat(module.num_layers, 1)

    def of_state(state: Tensor) -> Tensor:
        return tidy(ways.view(len(ways), *[1] * (state.ndim - 2), -1).expand(state.shape))

    for state in [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]:
        fields = labels_of(state).fields
        _tie(slots, fields, of_state(state), f"{name} begins with it, state by state")
        if not fields and bool((state != state[..., :1]).any()):
            slots.keep(states, f"{name} begins with states of fixed width")
    # Of a packed sequence the first leaf holds its entries.
    made = next(leaf for leaf in tree_leaves(output[0]) if isinstance(leaf, Tensor))
    ended = [leaf for leaf in tree_leaves(output[1:]) if isinstance(leaf, Tensor)]
    known = [(made, Labelled([placed(states, made.ndim - 1, made.shape)]))]
    return known + [(state, Labelled([of_state(state)])) for state in ended]


def _tie(slots: Slots, fields: list[Tensor], own: Tensor, why: str) -> None:
    """Ties the channels along the last dimension to the layer's own; all others have to stay."""
    merged(slots, [*fields, own])
    for labels in fields:
        if labels.ndim - 1 not in varying(labels):
            slots.keep(compact(labels), why)
