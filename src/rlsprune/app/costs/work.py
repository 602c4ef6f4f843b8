"""What one rank takes for an event and for `rlsprune.shrink`: memory, time and bytes, from the shapes of the layers.

As if every layer read channels that can go: an upper bound for transformers, where the width of the residual stream
stays. A layer has ``n`` inputs, ``m`` sampled rows and ``o`` outputs. A multiplication comes with an addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsprune.reconstruction.calibration import rows_drawn
from rlsprune.reconstruction.leastsquares import MOST_INPUTS
from rlsprune.statistics.inputs import rows_kept

if TYPE_CHECKING:
    from rlsprune.app.costs.estimate import CostPlan, LayerPlan

__all__ = ["Work", "event_work", "shrink_work"]

_SINGLE, _DOUBLE = 4, 8  # bytes of a number
_GONE = 0.2  # of every layer, in an event
_CALIBRATION = 2048  # inputs that `shrink` looks at
_PASSES = 10  # forwards over them: two networks side by side, batch norms, scores
_SOLVES, _DAMPINGS = 6, 2  # for a layer in front of a ReLU, and for the damping of any


@dataclass(frozen=True)
class Work:
    """One thing that ranks do together, as one of them has it."""

    name: str
    memory: float
    """Bytes that it needs: of a step all that is kept, of the others what comes on top of that."""
    seconds: float
    """Of computing."""
    sent: float
    """Bytes that the rank sends."""


def event_work(plan: CostPlan) -> Work:
    """An event of a `Pruner` with ``criterion="obs"`` and exact statistics, which takes a fifth of every layer."""
    once = (plan.world_size - 1) / plan.world_size
    kept = plan.parameter_bytes + plan.velocity_bytes
    rows = [layer.groups * rows_kept(layer.inputs) * layer.inputs for layer in plan.layers]
    largest = max((_event_bytes(layer) for layer in plan.layers), default=0)
    # The old tensors stay until the event is sound; every rank samples its share of the rows while it trains.
    memory = kept / plan.parts + _SINGLE * sum(rows) / plan.world_size + largest
    # Rows are gathered on every rank. fully_shard: every tensor is gathered, cut, and divided again.
    sent = once * _SINGLE * sum(rows) + (2 * once * kept if plan.parts > 1 else 0)
    return Work("event", memory, sum(plan.machine.seconds(_event_products(layer), 0) for layer in plan.layers), sent)


def _event_bytes(layer: LayerPlan) -> float:
    """The gathered rows of a layer, its statistics, and its weight as it is gathered and refitted."""
    n, m = layer.inputs, rows_kept(layer.inputs)
    statistics = 2 * _SINGLE * n**2 if n <= m else 2 * _DOUBLE * m * n
    return layer.groups * (_SINGLE * m * n + statistics) + 2 * layer.velocity_bytes


def _event_products(layer: LayerPlan) -> float:
    """Autocorrelation, factor, blocks of the inverse, and the refit; in the space of rows where these are fewer."""
    n, m, o = layer.inputs, rows_kept(layer.inputs), layer.outputs // layer.groups
    if n <= m:
        return layer.groups * (m * n**2 / 2 + n**3 / 2 + _GONE * n * (_GONE * n * n + n * o))
    return layer.groups * (2 * m**2 * n + m**3 / 6 + (1 + _GONE) * m * n * o)


def shrink_work(plan: CostPlan, flops: int) -> Work:
    """One size of `rlsprune.shrink` in closed form, from 2,048 inputs of all ranks together."""
    solves = _DAMPINGS + (_SOLVES if plan.clipped else 1)
    divided, own, sent, largest = 0.5 * flops * _PASSES * _CALIBRATION, 0.0, 0.0, 0.0
    for layer in plan.layers:
        n, m, o = layer.inputs, rows_drawn(layer.inputs, layer.groups), layer.outputs // layer.groups
        weights = layer.groups * n * o
        if n <= MOST_INPUTS:
            # Two Gram matrices; elimination, which a rank does for every so many-th group; the solutions' columns.
            divided += layer.groups * (2 * m * n**2 + 3.5 * n**3 + n**2 * o + solves * (2 * m * n * o + n**2 * o))
            own += layer.groups * n**3 / 6
            sent += _DOUBLE * 2 * (2 * layer.groups * n**2 + 2 * solves * weights)
            held = 3 * _DOUBLE * n**2 + _SINGLE * m * n / plan.world_size
        else:
            divided += layer.groups * solves * m**2 * o
            own += layer.groups * (m**2 * n + m**3 / 6 + solves * 2 * m * n * o)
            sent += layer.groups * _SINGLE * m * (n + o) + _DOUBLE * 2 * solves * layer.groups * m * o
            held = _SINGLE * m * (n + 2 * o) + 2 * _DOUBLE * m**2
        largest = max(largest, layer.groups * held + _DOUBLE * 3 * weights)
    once = (plan.world_size - 1) / plan.world_size
    # The network, the whole one beside it, and the copy that every size starts from.
    memory = 3 * plan.parameter_bytes + largest
    return Work("shrink", memory, plan.machine.seconds(divided / plan.world_size + own, 0), once * sent)
