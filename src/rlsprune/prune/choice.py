"""The order in which units of a whole network go, and their costs, from one pass over the inputs of all its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlsprune.graph import ChannelGraph, Group, Member
from rlsprune.graph.sites import Site, layer_names
from rlsprune.model.product import Product
from rlsprune.model.tensors import exact
from rlsprune.prune.criteria import product_norms, weight_norms
from rlsprune.prune.elimination import Curve, FixedScores, Reader, ReaderInRows, UnitReader, eliminate
from rlsprune.reconstruction.calibration import Calibration, Lanes, gather_rows
from rlsprune.reconstruction.leastsquares import DAMPING, MOST_INPUTS, product_in_pieces
from rlsprune.reconstruction.rebuild import affine_of, can_shift
from rlsprune.reconstruction.replay import Replay, Stop, closing
from rlsprune.statistics.inverse import from_rows
from rlsprune.statistics.rows import input_rows

__all__ = ["Eliminations", "find_curves"]

_ROWS_IN_ROWS = 2048  # rows kept of a layer with too many inputs for an autocorrelation matrix
_AVERAGED = 0.25  # 0: errors at the places of an image are one error; 1: they are independent and average out


@dataclass
class _Seen:
    """Sums over the inputs that all calls with one weight have seen on all ranks."""

    count: float = 0.0
    """Number of rows."""
    held_count: float = 0.0
    """Number of rows held back: units are judged by them, not chosen."""
    square: Tensor | None = None
    """``XᵀX`` of the other rows, ``(groups, n, n)``. The rows end with a 1 where the layer's output can be shifted.
    None for a layer with too many inputs."""
    held_square: Tensor | None = None
    """``XᵀX`` of the held-back rows."""
    total: Tensor | None = None
    """The sum of all rows, ``(groups, n)``."""
    rows: Tensor | None = None
    """A sample of the rows to choose by, ``(m, n)``, for a layer with too many inputs."""
    held_rows: Tensor | None = None
    """A sample of the held-back rows."""
    weights: Tensor | None = None
    """The weight as a matrix, ``(groups, n, outputs)``, with the shift as last row where there is one."""
    scale: Tensor | None = None
    """The weight of each output's error."""
    variance: float = 0.0
    places: float = 0.0
    """Places of all calls per input of the network, on average: pixels, or tokens that are not padding."""

    @property
    def counts(self) -> float:
        """Returns the weight of a lost share of the variance. Later layers average errors over places."""
        return float(max(self.places, 1.0) ** -_AVERAGED)

    def own_share(self) -> float:
        """Returns the layer's own share of the variance that errors are measured by: 1, or less within a sum."""
        if self.weights is None or self.scale is None or self.total is None:
            return 1.0
        weights = self.weights.to(self.total) * exact(self.scale).to(self.total).view(len(self.weights), 1, -1)
        if self.square is not None and self.held_square is not None:
            squares = (weights * ((self.square + self.held_square) @ weights)).sum(1)
        else:
            assert self.rows is not None
            assert self.held_rows is not None
            rows = torch.cat([self.rows, self.held_rows])
            squares = exact(rows @ weights[0].to(rows)).square().sum(0, keepdim=True)
        sums = (self.total[:, None, :] @ weights)[:, 0]
        return min(1.0, _variance(self.count, sums, squares) / max(self.variance, torch.finfo(torch.float32).tiny))

    def autocorrelation(self) -> Tensor:
        """Returns ``XᵀX/m`` of the rows to choose by, damped."""
        assert self.square is not None
        result = self.square / max(self.count - self.held_count, 1.0)
        diagonal = result.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(DAMPING * max(float(diagonal.mean()), torch.finfo(torch.float32).tiny))
        return result


@dataclass
class Eliminations:
    """The results of one pass over the whole network."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Name of a group → the order in which its units go, and the costs."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Name of a layer that is called several times → the autocorrelation of its inputs in all calls."""


def find_curves(
    whole: nn.Module,
    graph: ChannelGraph,
    sites: Mapping[tuple[str, int], Site],
    batches: Calibration,
    products: Mapping[str, tuple[Tensor, Tensor]],
    on_layer: Callable[[str, int, int], object] = lambda name, done, total: None,
) -> Eliminations:
    """Finds for each group the order in which its units go, and the costs.

    The network runs once and stops at every layer. Only the inputs of one layer are held at a time, or those of all
    layers that read one group.

    Args:
        whole: The network, in evaluation mode.
        graph: The groups of the network.
        sites: The calls of the network's layers.
        batches: The inputs to calibrate on.
        products: Name of a group of dimensions of queries and keys → second moments of both, head by head.
        on_layer: Called with each layer's name, the number of layers done, and their total number.
    """
    names = layer_names(whole)
    modules = dict(whole.named_modules())
    groups = list(graph)
    attended = {group.name: _output_projections(group, groups) for group in groups}
    waiting = {group.name: {_home(member, modules, names) for member in attended[group.name]} for group in groups}
    wanted = set().union(*waiting.values()) if waiting else set()
    watched = {key: site for key, site in sites.items() if site.layer in wanted}
    last = {site.layer: number for number, site in enumerate(watched.values(), 1)}
    ready = {group.name: max((last.get(name, 0) for name in waiting[group.name]), default=0) for group in groups}
    # Ranks take groups in turn, in the order in which their inputs become known. They start when each rank has one.
    rank, size = batches.reduction.rank, batches.reduction.size
    groups.sort(key=lambda group: ready[group.name])
    rounds = [groups[start : start + size] for start in range(0, len(groups), size)]
    turns = [(ready[each[-1].name], each[rank]) for each in rounds if rank < len(each)]
    seen: dict[str, _Seen] = {}
    found = Eliminations()

    def eliminated(group: Group) -> Curve:
        readers = [_reader(member, seen.get(_home(member, modules, names))) for member in group.consumers]
        if group.products:
            reading = [seen.get(_home(member, modules, names)) for member in attended[group.name]]
            readers.append(_score_reader(group, products.get(group.name), reading))
        return eliminate(readers, group.size, repr(group.name))

    replay = Replay(whole, watched, batches.calls, ahead=False)
    lanes = batches.lanes(sites)
    with closing(replay):
        for number, key in enumerate(watched, 1):
            stops = replay.advance(lanes[key].own)
            if not stops:
                break
            site = stops[0].site
            on_layer(site.layer, number, len(watched))
            norms = [modules[name] for name in site.norms]
            after = modules[site.layer_norm] if site.layer_norm is not None else None
            _look(seen.setdefault(site.layer, _Seen()), batches, stops, norms, after, number, lanes[key])
            if site.shared and number == last[site.layer] and seen[site.layer].square is not None:
                found.shared[site.layer] = seen[site.layer].autocorrelation()
            while turns and turns[0][0] <= number:
                _, group = turns.pop(0)
                found.curves[group.name] = eliminated(group)
            needed = set().union(*(waiting[group.name] for _, group in turns))
            seen = {name: own for name, own in seen.items() if name in needed or last[name] > number}
    found.curves |= {group.name: eliminated(group) for _, group in turns}
    found.curves = {name: curve for own in batches.reduction.gather(found.curves) for name, curve in own.items()}
    return found


def _home(member: Member, modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> str:
    """Returns the name of the layer that calls are counted under: the first one with that weight."""
    return names.get(id(modules[member.name]._parameters.get("weight")), member.name)


def _look(
    seen: _Seen,
    batches: Calibration,
    stops: Sequence[Stop],
    norms: Sequence[nn.Module],
    layer_norm: nn.Module | None,
    seed: int,
    lanes: Lanes,
) -> None:
    """Adds the inputs and results of one call of a layer, over all batches, to the sums."""
    product = stops[0].product
    shifted = can_shift(product, norms)
    width = product.width + shifted
    wide = width > MOST_INPUTS and product.groups == 1
    scale, _ = affine_of(norms, product.matrix[:, 0].numel(), product.inputs)
    zero = exact(product.inputs.new_zeros(()))
    there = [stop.product.places if (own := stop.places()) is None else len(own) for stop in stops[: lanes.counted]]
    count, sums = zero.clone(), zero.new_zeros(3, len(scale))  # sums of results, their squares, and 1/σ² of the rows
    squares = zero.new_zeros(2, product.groups, width, 0 if wide else width)
    total, held_count = zero.new_zeros(product.groups, width), zero.clone()
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    places = batches.draw(stops, seed, lanes, _ROWS_IN_ROWS if wide else None)
    for stop, where, *parts in zip(stops, places, *batches.split(stops, places), strict=True):
        for number, part in enumerate(parts):  # to choose by, and held back
            own = gather_rows([stop], [part], shifted)
            if wide:
                rows[number].append(own)
            else:
                squares[number] += product_in_pieces(own, own, [len(part)])
            total += exact(own.sum(1))
        held_count += len(parts[1])
        assert stop.result is not None
        results = stop.product.at(stop.result, where)
        if not stop.site.sums:
            results = results * scale
        if isinstance(layer_norm, nn.LayerNorm):
            variances = results.float().var(1, correction=0) + layer_norm.eps
            sums[2] += exact(variances.reciprocal()).sum()
            results = layer_norm(results)
        sums[0] += exact(results).sum(0)
        sums[1] += exact(results).square().sum(0)
        count += len(where)
    squares, total, sums, count, held_count, all_places = batches.reduction.sums(
        squares, total, sums, count, held_count, zero + sum(there)
    )
    if isinstance(layer_norm, nn.LayerNorm):
        # Errors count as after the layer norm: before it, some channels of a transformer are a hundred times as large.
        scale = scale * layer_norm.weight.detach().abs().to(scale) * (sums[2, 0] / count.clamp_min(1)).sqrt().to(scale)
    if wide:
        drawn = [batches.reduction.rows(torch.cat(part, dim=1))[0] for part in rows]
        seen.rows = drawn[0] if seen.rows is None else torch.cat([seen.rows, drawn[0]])
        seen.held_rows = drawn[1] if seen.held_rows is None else torch.cat([seen.held_rows, drawn[1]])
    else:
        seen.square = squares[0] if seen.square is None else seen.square + squares[0]
        seen.held_square = squares[1] if seen.held_square is None else seen.held_square + squares[1]
    seen.total = total if seen.total is None else seen.total + total
    seen.count += float(count)
    seen.held_count += float(held_count)
    seen.scale, seen.weights = scale, _with_bias(product, width)
    seen.places += float(all_places) / lanes.inputs
    seen.variance += _variance(float(count), sums[0], sums[1])


def _variance(count: float, sums: Tensor, squares: Tensor) -> float:
    """Returns the sum of the channels' variances, from the sums of their values and of their squared values."""
    return float((squares - sums.square() / max(count, 1.0)).clamp_min(0).sum()) / max(count - 1, 1.0)


def _output_projections(group: Group, groups: Sequence[Group]) -> Sequence[Member]:
    """Returns the layers that read a group, or else its attention: queries and keys have no readers of their own."""
    if group.consumers or group.attention is None:
        return group.consumers
    name = group.attention.name
    return next((own.consumers for own in groups if own.consumers and own.attention and own.attention.name == name), ())


def _score_reader(group: Group, moments: tuple[Tensor, Tensor] | None, reading: Sequence[_Seen | None]) -> UnitReader:
    """Returns the scores of attention as a reader: they read keys with queries as weights, head by head.

    A lost share of the scores' variance counts as the same lost share of the attention's output, as its readers see it.
    """
    share = max((seen.own_share() * seen.counts for seen in reading if seen is not None), default=1.0)
    if moments is None:
        scores = sum(map(product_norms, group.products), start=torch.zeros(group.size, dtype=torch.float64))
        return FixedScores(share * scores / scores.sum().clamp_min(torch.finfo(torch.float64).tiny))
    queries, keys = moments
    variance = (queries * keys).sum((1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    weights = torch.linalg.cholesky(queries) * (share / (len(queries) * variance)).sqrt()[:, None, None]
    rows = torch.arange(group.size).view(1, -1, 1).expand(len(queries), -1, 1)
    return Reader(keys, weights, rows)


def _reader(member: Member, seen: _Seen | None) -> UnitReader:
    """Returns a consumer of a group as a reader. Without its inputs, its weights alone score the units."""
    if seen is None or seen.scale is None or seen.weights is None:
        norms = weight_norms(member, 2)
        return FixedScores(norms / norms.sum().clamp_min(torch.finfo(torch.float64).tiny))
    groups = len(seen.weights)
    variance = max(seen.variance, torch.finfo(torch.float32).tiny)
    counts = exact(seen.scale).view(groups, 1, -1) * (seen.counts / variance) ** 0.5
    matrix, index = seen.weights, input_rows(member.module, member.index)
    if seen.square is None:
        assert seen.rows is not None
        assert seen.held_rows is not None
        judges = seen.held_rows if len(seen.held_rows) else seen.rows
        return ReaderInRows(from_rows(seen.rows, DAMPING), (matrix * counts)[0], index[0], judges)
    assert seen.held_square is not None
    held_back = seen.held_square / seen.held_count if seen.held_count else None
    return Reader(seen.autocorrelation(), matrix * counts, index, held_back)


def _with_bias(product: Product, width: int) -> Tensor:
    matrix = exact(product.matrix)
    if width == matrix.shape[1]:
        return matrix
    last = matrix.new_zeros(len(matrix), 1, matrix.shape[2])
    if product.bias is not None:
        last = exact(product.bias.detach()).view_as(last)
    return torch.cat([matrix, last], dim=1)
