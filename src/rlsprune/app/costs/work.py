"""Estimates memory, time and sent bytes of one rank for an event and for `rlsprune.shrink`, from the layers' shapes.

It counts every layer as if it read channels that can be removed. For transformers, where the width of the residual
stream stays, this is an upper bound. A layer has ``n`` inputs, ``m`` sampled rows and ``o`` outputs. A multiplication
comes with an addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsprune.reconstruction.calibration import rows_drawn
from rlsprune.reconstruction.leastsquares import MOST_INPUTS
from rlsprune.reconstruction.rebuild import JUDGES
from rlsprune.statistics.inputs import rows_kept

if TYPE_CHECKING:
    from rlsprune.app.costs.estimate import CostPlan, LayerPlan

__all__ = ["Work", "event_work", "shrink_work"]

_SINGLE, _DOUBLE = 4, 8  # bytes of a number
_GONE = 0.2  # share of every layer that an event removes
_CALIBRATION = 2048  # inputs that `shrink` calibrates with
_PASSES = 10  # forward passes over them: two networks side by side, batch norms, scores
_SOLVES, _DAMPINGS = 6, 2  # solves of a layer in front of a ReLU, and dampings that are tried on some outputs of any


@dataclass(frozen=True)
class Work:
    """One rank's part of an operation of all ranks."""

    name: str
    memory: float
    """Bytes that it needs: for a step everything that is kept, for the others the bytes on top of that."""
    seconds: float
    """The time of computing."""
    sent: float
    """The bytes that the rank sends."""


def event_work(plan: CostPlan) -> Work:
    """Estimates an event of a `Pruner` (``criterion="obs"``, exact statistics) that cuts a fifth of every layer."""
    once = (plan.world_size - 1) / plan.world_size
    kept = plan.parameter_bytes + plan.velocity_bytes
    rows = [layer.groups * rows_kept(layer.inputs) * layer.inputs for layer in plan.layers]
    largest = max((_event_bytes(layer) for layer in plan.layers), default=0)
    # The old tensors stay until the event has succeeded; every rank samples its share of the rows while it trains.
    memory = kept / plan.parts + _SINGLE * sum(rows) / plan.world_size + largest
    # Rows are gathered on every rank. With fully_shard every tensor is gathered, cut, and divided again.
    sent = once * _SINGLE * sum(rows) + (2 * once * kept if plan.parts > 1 else 0)
    return Work("event", memory, sum(plan.machine.seconds(_event_products(layer), 0) for layer in plan.layers), sent)


def _event_bytes(layer: LayerPlan) -> float:
    """Counts the bytes of a layer's gathered rows, its statistics, and its weight, gathered and refitted."""
    n, m = layer.inputs, rows_kept(layer.inputs)
    statistics = 2 * _SINGLE * n**2 if n <= m else 2 * _DOUBLE * m * n
    return layer.groups * (_SINGLE * m * n + statistics) + 2 * layer.velocity_bytes


def _event_products(layer: LayerPlan) -> float:
    """Counts products of autocorrelation, factor, inverse blocks and refit; in the space of rows if these are fewer."""
    n, m, o = layer.inputs, rows_kept(layer.inputs), layer.outputs // layer.groups
    if n <= m:
        return layer.groups * (m * n**2 / 2 + n**3 / 2 + _GONE * n * (_GONE * n * n + n * o))
    return layer.groups * (2 * m**2 * n + m**3 / 6 + (1 + _GONE) * m * n * o)


def shrink_work(plan: CostPlan, flops: int) -> Work:
    """Estimates one size of `rlsprune.shrink` in closed form, from 2,048 inputs of all ranks together."""
    solves = _SOLVES if plan.clipped else 1
    divided, own, sent, largest = 0.5 * flops * _PASSES * _CALIBRATION, 0.0, 0.0, 0.0
    for layer in plan.layers:
        n, m, o = layer.inputs, rows_drawn(layer.inputs, layer.groups), layer.outputs // layer.groups
        rows, weights, judges = layer.groups * m * (n + o), layer.groups * n * o, min(o, JUDGES)
        side = n if n <= MOST_INPUTS else m  # size of the Gram matrix
        if n <= MOST_INPUTS:
            # Two Gram matrices are summed over the ranks; the ranks divide the elimination by groups.
            divided += layer.groups * (m * n**2 + 3.5 * n**3 + n**2 * o)
            sent += 2 * _DOUBLE * 2 * layer.groups * n**2
        # The refit: every rank has all rows, one Gram matrix and its factors; the outputs are divided.
        factors = side * m * n + (_DAMPINGS + 1) * side**3 / 6
        own += layer.groups * (factors + _DAMPINGS * judges * (2 * m * n + side**2))
        divided += layer.groups * solves * o * (2 * m * n + side**2)
        sent += _SINGLE * rows + 2 * _DOUBLE * weights
        held = 3 * _DOUBLE * layer.groups * side**2 + _SINGLE * rows * (1 if plan.world_size == 1 else 2)
        largest = max(largest, held + _DOUBLE * 3 * weights)
    once = (plan.world_size - 1) / plan.world_size
    # The network, the unpruned one beside it, and the copy from which every size starts.
    memory = 3 * plan.parameter_bytes + largest
    return Work("shrink", memory, plan.machine.seconds(divided / plan.world_size + own, 0), once * sent)
