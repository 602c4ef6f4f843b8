"""The sequential refit: layer by layer, a cut network is fitted to the outputs of the whole one, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph.sites import Site
from rlsprune.model.product import Product
from rlsprune.model.tensors import exact, memory_format, replace_data
from rlsprune.reconstruction.calibration import Calibration, gather_rows
from rlsprune.reconstruction.leastsquares import DAMPING, LeastSquares, best_damping, clipped_fit
from rlsprune.reconstruction.replay import Replay, Stop, closing
from rlsprune.reconstruction.rows import FitRows, Part, count_rows, gather_all

__all__ = ["JUDGES", "affine_of", "can_shift", "rebuild"]

JUDGES = 64
"""Largest number of outputs that choose the damping of a layer; every rank solves for all of them."""

_CLIP_ROUNDS = 5
_LEAST_SCALE = 0.05  # share of the median; a smaller scale cannot compensate the error of a sum
_SAME = 1e-6  # share of the targets' norm; an output this close has not drifted


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
    a sum also compensates the error of the other summand.

    Args:
        whole: The network before the cut, in evaluation mode. It does not change.
        cut: The network without some of its channels, in evaluation mode.
        sites: Sites of the whole network.
        kept: Name of a layer → the output channels of the whole network that it still has; all if not named.
        batches: Inputs, without targets.
        damping: Least damping towards a layer's present weights, as a share of the mean square of its inputs; a larger
            one is used if it is better on held-back inputs.
        on_layer: Called with each layer's name, the number of layers done, and their total number.

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
            # A forward that stops at a sum stops later than its layer is called; the earlier call sets the lanes.
            active = lanes[order[number]]
            targets, inputs = theirs.advance(active.own), ours.advance(active.own)
            if not targets:
                break
            number += 1
            site = inputs[0].site
            layer = modules[site.layer]
            norms = [modules[name] for name in site.norms]
            on_layer(site.layer, number, len(fitted))
            places = batches.draw(inputs, number, active)
            problem = _Problem(batches, norms, site, targets, inputs, kept.get(site.layer))
            if problem.refit(layer, places, damping):
                refitted.append(site.layer)
        ours.advance(len(inputs))
        theirs.advance(len(inputs))
    return refitted


class _Problem:
    """The refit of one layer.

    Args:
        batches: The inputs of the networks.
        norms: The batch norms that the layer's output goes through.
        site: The layer's call.
        targets: Stops of the whole network, after the layer has acted.
        inputs: Stops of the cut network, before the layer acts.
        kept: Output channels of the whole network that the layer still has; None for all.
    """

    def __init__(
        self,
        batches: Calibration,
        norms: Sequence[nn.Module],
        site: Site,
        targets: Sequence[Stop],
        inputs: Sequence[Stop],
        kept: Tensor | None,
    ) -> None:
        self._batches, self._norms, self._site, self._kept = batches, norms, site, kept
        self._theirs, self._ours, self._product = targets, inputs, inputs[0].product
        self._movable = can_shift(self._product, norms)
        assert targets[0].output is not None
        self._matrix = exact(self._product.matrix)
        self._scale, self._shift = affine_of(norms, self._matrix[:, 0].numel(), targets[0].output)

    def refit(self, layer: nn.Module, places: Sequence[Tensor], damping: float) -> bool:
        """Gives the layer new weights if they are better. Returns whether it did."""
        if not self._product.inputs.is_floating_point():
            return False
        fitted, held = self._batches.split(self._ours, places)
        fit = self._fit(self._rows(fitted), self._rows(held), damping)
        if fit is None:
            return False
        weight, intercept = fit
        _apply(layer, self._norms, self._scale, self._product.weight_of(weight), intercept)
        return True

    def _rows(self, places: Sequence[Tensor]) -> FitRows:
        rows = gather_rows(self._ours, places, self._movable)
        own = self._of_whole([stop.output for stop in self._theirs], places)
        scale, shift = self._scale, self._shift
        if self._site.sums:
            pairs = zip(self._ours, places, strict=True)
            other = torch.cat([stop.product.at(stop.other, where) for stop, where in pairs if stop.other is not None])
            summed = self._of_whole([stop.result for stop in self._theirs], places)
            usable = scale.abs() >= _LEAST_SCALE * scale.abs().median()
            safe = torch.where(usable, scale, torch.ones_like(scale))
            wanted = torch.where(usable, (summed - other - shift) / safe, own)
            offset = shift + other
        else:
            usable, wanted, offset = scale.abs() > 0, own, shift[None]
        low, high = _limits(self._site, scale, offset, usable)

        def by_group(values: Tensor) -> Tensor:
            count, channels = values.shape
            return values.to(rows.dtype).reshape(count, len(rows), channels // len(rows)).movedim(1, 0)

        low, high = (None if end is None else by_group(end) for end in (low, high))
        pieces = [len(where) for where in places]
        return FitRows(rows, by_group(wanted), low, high, pieces, ends_by_row=self._site.sums)

    def _of_whole(self, tensors: Sequence[Tensor | None], places: Sequence[Tensor]) -> Tensor:
        parts = zip(self._theirs, tensors, places, strict=True)
        both = torch.cat([stop.product.at(tensor, where) for stop, tensor, where in parts if tensor is not None])
        return both if self._kept is None else both[:, self._kept.to(both.device)]

    def _start(self) -> Tensor:
        """Returns the layer's weight matrix, with its bias as last row if its outputs can be shifted."""
        weight, own = self._matrix, self._product.bias
        if not self._movable:
            return weight
        bias = exact(own.detach()) if own is not None else weight.new_zeros(weight.shape[0] * weight.shape[2])
        return torch.cat([weight, bias.view(weight.shape[0], 1, -1)], dim=1)

    def _fit(self, rows: FitRows, held: FitRows, damping: float) -> tuple[Tensor, Tensor | None] | None:
        """Fits the weight matrix ``(groups, n, outputs)`` and intercept ``(groups, outputs)``; None to keep both."""
        weight, reduction = self._start(), self._batches.reduction
        drifts = weight.new_zeros(2)
        for part in (rows, held):
            drifts[0] += (part.inputs @ weight.to(part.inputs) - part.targets).square().sum().to(drifts)
            drifts[1] += part.targets.square().sum().to(drifts)
        counts, (drift, size) = count_rows(self._batches, (rows, held), drifts)
        fitted, back = counts.sum((0, 2)).tolist()
        if not fitted or float(drift) <= _SAME**2 * float(size):
            return None
        rows, held = gather_all(self._batches, (rows, held), counts)
        problem = LeastSquares(rows.inputs, weight.to(rows.inputs.device), damping, pieces=rows.pieces)
        groups, _, outputs = weight.shape
        if back:
            problem = problem.damped(_tried_damping(problem, rows, held, damping))
        share = Part.share(groups, outputs, reduction.rank, reduction.size)
        own, solution, errors = held.part(share), torch.zeros_like(weight), weight.new_zeros(2)
        share.of(solution).copy_(_solved(problem.part(share), rows.part(share)))
        errors[0], errors[1] = own.errors(share.of(solution)), own.errors(share.of(weight))
        solution, (after, before) = reduction.sums(solution, errors)
        if (back and not float(after) < float(before)) or not bool(solution.isfinite().all()):
            return None
        width = self._product.width
        return (solution[:, :width], solution[:, width]) if self._movable else (solution, None)


def _tried_damping(problem: LeastSquares, rows: FitRows, held: FitRows, damping: float) -> float:
    """Returns the damping with the least error of some outputs on held-back rows."""
    groups, _, outputs = problem.start.shape
    judges = Part.sampled(groups, outputs, JUDGES)
    some, targets, judged = problem.part(judges), judges.of(rows.targets), held.part(judges)
    return best_damping(lambda tried: float(judged.errors(some.damped(tried)(targets))), damping)


def _solved(problem: LeastSquares, rows: FitRows) -> Tensor:
    if rows.low is None or rows.high is None:
        return problem(rows.targets)
    return clipped_fit(problem, rows.targets, rows.low, rows.high, _CLIP_ROUNDS)


def affine_of(norms: Sequence[nn.Module], channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``a`` and ``c`` of the map ``a·z + c`` that batch norms compute in evaluation mode, for each channel."""
    scale, shift = like.new_ones(channels), like.new_zeros(channels)
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
    """Returns the ends at which the layer's own output is clipped, by a clipping after scale, shift and sum."""
    if site.low == -math.inf and site.high == math.inf:
        return None, None
    safe = torch.where(usable, scale, torch.ones_like(scale))
    ends = [(site.low - offset) / safe, (site.high - offset) / safe]
    low, high = torch.where(safe > 0, ends[0], ends[1]), torch.where(safe > 0, ends[1], ends[0])
    return low.masked_fill(~usable, -math.inf), high.masked_fill(~usable, math.inf)


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
