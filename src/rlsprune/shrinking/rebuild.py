"""The sequential refit: layer by layer, a cut network learns to say what the whole one says, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph.sites import Site
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.product import Product
from rlsprune.model.tensors import exact, memory_format, replace_data
from rlsprune.shrinking.leastsquares import LeastSquares, clipped_fit
from rlsprune.shrinking.replay import Replay, Stop, closing

__all__ = ["Calibration", "affine_of", "can_shift", "draw_places", "gather_rows", "rebuild"]

DAMPING = 1e-3
_HELD_BACK = 5  # the last fifth of the rows, of other inputs, tells whether a solution is better
_CLIP_ROUNDS = 5
# Rows of a layer: so many times its inputs or the second number, whichever is more, while they stay below so many
# entries in all.
_ROWS_PER_INPUT, _LEAST_ROWS, _MOST_ENTRIES = 8, 16384, 2**25
# Bytes that the activations of one network may take while all its forwards wait at a layer.
_LIVE_BYTES = 2**27
_LEAST_SCALE = 0.05  # of the median: a sum cannot be made up for through a smaller scale
_SAME = 1e-6  # of the targets' norm: an output this close has not drifted


class Calibration(NamedTuple):
    """Inputs to calibrate on, in pieces that a network can take."""

    calls: Sequence[ExampleInputs]
    sizes: Sequence[int]
    """Inputs in each."""

    def lanes(self, sites: Mapping[tuple[str, int], Site]) -> dict[tuple[str, int], int]:
        """How many of the pieces can wait at each site together; never fewer at a later site."""
        result: dict[tuple[str, int], int] = {}
        lanes = len(self.calls)
        for key, site in reversed(list(sites.items())):
            taken = 3 * 4 * site.size * max(self.sizes)
            lanes = max(1, min(lanes, _LIVE_BYTES // max(taken, 1)))
            result[key] = lanes
        return result


def draw_places(stops: Sequence[Stop], seed: int) -> list[Tensor]:
    """Rows of a layer to work with, the same share of each piece's; the same again for the same seed."""
    product = stops[0].product
    counted = [stop.places() for stop in stops]
    sizes = [stop.product.places if own is None else len(own) for stop, own in zip(stops, counted, strict=True)]
    width = product.width + 1
    most = _MOST_ENTRIES // (width * product.groups)
    wanted = min(max(_ROWS_PER_INPUT * width, min(_LEAST_ROWS, most)), max(most, 64))
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for own, size in zip(counted, sizes, strict=True):
        share = math.ceil(wanted * size / max(sum(sizes), 1))
        where = torch.arange(size)
        if share < size:
            where = torch.unique(torch.randint(size, (share,), generator=generator))
        drawn.append(where if own is None else own[where])
    return drawn


def gather_rows(stops: Sequence[Stop], places: Sequence[Tensor], shifted: bool) -> Tensor:
    """The drawn rows of a layer's inputs, ``(groups, m, n)``; with a last 1 for a shift of its outputs, if wanted."""
    first = stops[0].product
    counts = [len(where) for where in places]
    dtype = torch.promote_types(first.inputs.dtype, torch.float32)
    # One tensor from the start: a copy of it would be the largest there is.
    rows = torch.ones(first.groups, sum(counts), first.width + shifted, dtype=dtype, device=first.inputs.device)
    start = 0
    for stop, where, count in zip(stops, places, counts, strict=True):
        rows[:, start : start + count, : first.width] = stop.product.rows(where)
        start += count
    return rows


def can_shift(product: Product, norms: Sequence[nn.Module]) -> bool:
    """Whether the outputs of a layer can be shifted: by its bias, or by that of the one batch norm that reads it."""
    return product.bias is not None or (len(norms) == 1 and getattr(norms[0], "bias", None) is not None)


def rebuild(
    whole: nn.Module,
    cut: nn.Module,
    sites: Mapping[tuple[str, int], Site],
    kept: Mapping[str, Tensor],
    batches: Calibration,
    *,
    damping: float = DAMPING,
    on_layer: Callable[[str, int, int], object] = lambda name, done, total: None,
) -> list[str]:
    """Refits every layer of a cut network, in call order, to the outputs of the whole one.

    Both run on the same inputs, in step. At each layer the cut network's own inputs, errors of earlier layers included,
    are one side of the least-squares problem; the whole network's outputs are the other. A layer whose output goes into
    a sum makes up for the error of the other summand too.

    Args:
        whole: The network as it was, in evaluation mode. Not changed.
        cut: The network without some of its channels, in evaluation mode.
        sites: Of the whole network.
        kept: Name of a layer → which of the whole network's output channels it still has; all if not named.
        batches: Inputs; no targets.
        damping: Towards the weights that a layer has, as a share of the mean square of its inputs.
        on_layer: Told each layer's name, and how many are done of how many.

    Returns:
        Names of the layers that were refitted.
    """
    modules = dict(cut.named_modules())
    fitted = {key: site for key, site in sites.items() if not site.shared}
    if not fitted:
        return []
    lanes = batches.lanes(sites)
    refitted: list[str] = []
    theirs, ours = Replay(whole, fitted, batches.calls, ahead=False), Replay(cut, fitted, batches.calls, ahead=True)
    with closing(theirs, ours):
        number = 0
        order = list(fitted)
        while number < len(order):
            # A forward that stops at a sum stops later than its layer is called: as many lanes as the earlier allows.
            active = lanes[order[number]]
            targets, inputs = theirs.advance(active), ours.advance(active)
            if not targets:
                break
            number += 1
            site = inputs[0].site
            layer = modules[site.layer]
            norms = [modules[name] for name in site.norms]
            on_layer(site.layer, number, len(fitted))
            if _refit(layer, norms, site, targets, inputs, kept.get(site.layer), damping, number):
                refitted.append(site.layer)
        ours.advance(len(inputs))
        theirs.advance(len(inputs))
    return refitted


def _refit(
    layer: nn.Module,
    norms: Sequence[nn.Module],
    site: Site,
    targets: Sequence[Stop],
    inputs: Sequence[Stop],
    kept: Tensor | None,
    damping: float,
    seed: int,
) -> bool:
    """Gives one layer new weights, if they are better."""
    places = draw_places(inputs, seed)
    pairs = list(zip(inputs, places, strict=True))
    product = inputs[0].product
    if not any(len(where) for where in places) or not product.inputs.is_floating_point():
        return False
    rows = gather_rows(inputs, places, can_shift(product, norms))

    def of_whole(tensors: Sequence[Tensor | None]) -> Tensor:
        parts = zip(targets, tensors, places, strict=True)
        both = torch.cat([stop.product.at(tensor, where) for stop, tensor, where in parts if tensor is not None])
        return both if kept is None else both[:, kept.to(both.device)]

    own = of_whole([stop.output for stop in targets])
    scale, shift = affine_of(norms, own)
    if site.sums:
        others = [stop.other for stop in inputs]
        assert all(other is not None for other in others)
        other = torch.cat([stop.product.at(stop.other, where) for stop, where in pairs if stop.other is not None])
        summed = of_whole([stop.result for stop in targets])
        usable = scale.abs() >= _LEAST_SCALE * scale.abs().median()
        safe = torch.where(usable, scale, torch.ones_like(scale))
        wanted = torch.where(usable, (summed - other - shift) / safe, own)
        offset = shift + other
    else:
        usable, wanted, offset = scale.abs() > 0, own, shift.expand_as(own)
    low, high = _limits(site, scale, offset, usable)
    fit = _fit(product, rows, wanted, low, high, damping)
    if fit is None:
        return False
    weight, intercept = fit
    _apply(layer, norms, scale, product.weight_of(weight), intercept)
    return True


def affine_of(norms: Sequence[nn.Module], like: Tensor) -> tuple[Tensor, Tensor]:
    """``a`` and ``c`` of the map ``a·z + c`` that batch norms make in evaluation mode."""
    scale, shift = torch.ones_like(like[0]), torch.zeros_like(like[0])
    for norm in norms:
        assert isinstance(norm, _BatchNorm)
        assert norm.running_var is not None
        assert norm.running_mean is not None
        own = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            own = own * norm.weight
        scale, shift = scale * own, (shift - norm.running_mean) * own
        if norm.bias is not None:
            shift = shift + norm.bias
    return scale.detach(), shift.detach()


def _limits(site: Site, scale: Tensor, offset: Tensor, usable: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Where the layer's own output is clipped, of what comes after the scale, the shift and the sum."""
    if site.low == -math.inf and site.high == math.inf:
        return None, None
    safe = torch.where(usable, scale, torch.ones_like(scale))
    ends = [(site.low - offset) / safe, (site.high - offset) / safe]
    low, high = torch.where(safe > 0, ends[0], ends[1]), torch.where(safe > 0, ends[1], ends[0])
    return low.masked_fill(~usable, -math.inf), high.masked_fill(~usable, math.inf)


def _fit(
    product: Product,
    rows: Tensor,
    wanted: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    damping: float,
) -> tuple[Tensor, Tensor | None] | None:
    """Weight matrix ``(groups, n, outputs)`` and intercept ``(groups, outputs)``; None to leave the layer alone."""
    groups, count, _ = rows.shape
    width = product.width
    movable = rows.shape[2] > width
    weight = exact(product.matrix)

    def by_group(values: Tensor) -> Tensor:
        return values.to(rows.dtype).reshape(count, groups, -1).movedim(1, 0)

    targets = by_group(wanted)
    if movable:
        bias = exact(product.bias.detach()) if product.bias is not None else weight.new_zeros(groups * weight.shape[2])
        weight = torch.cat([weight, bias.view(groups, 1, -1)], dim=1)
    outputs = rows @ weight.to(rows)
    if float((outputs - targets).norm()) <= _SAME * float(targets.norm()):
        return None
    fitted = count - count // _HELD_BACK if count >= 4 * _HELD_BACK else count
    part, back = slice(0, fitted), slice(fitted, count)
    problem = LeastSquares(rows[:, part], weight.to(rows.device), damping)
    if low is None or high is None:
        solution = problem(targets[:, part])
        clip: Callable[[Tensor], Tensor] = lambda values: values  # noqa: E731
    else:
        lows, highs = by_group(low), by_group(high)
        solution = clipped_fit(problem, targets[:, part], lows[:, part], highs[:, part], _CLIP_ROUNDS)
        clip = lambda values: values.clamp(lows[:, back], highs[:, back])  # noqa: E731
    if fitted < count:
        held, told = rows[:, back], clip(targets[:, back])

        def error(matrix: Tensor) -> float:
            return float((clip(held @ matrix.to(held)) - told).square().sum())

        if not error(solution) < error(weight):
            return None
    if not bool(solution.isfinite().all()):
        return None
    return (solution[:, :width], solution[:, width]) if movable else (solution, None)


def _apply(layer: nn.Module, norms: Sequence[nn.Module], scale: Tensor, new: Tensor, intercept: Tensor | None) -> None:
    weight = layer._parameters["weight"]
    assert weight is not None
    replace_data(weight, new.to(weight).contiguous(memory_format=memory_format(weight)))
    if intercept is None:
        return
    bias = layer._parameters.get("bias")
    if bias is not None:
        replace_data(bias, intercept.reshape(bias.shape).to(bias))
    else:
        shift = norms[0].bias
        assert isinstance(shift, Tensor)
        replace_data(shift, (shift.detach() + scale.to(shift) * intercept.reshape(shift.shape).to(shift)))
