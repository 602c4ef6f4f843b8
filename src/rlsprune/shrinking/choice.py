"""What can go from a whole network, and what it costs: one look at the inputs of all its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlsprune.graph import ChannelGraph, Group, Member
from rlsprune.graph.sites import Site, layer_names
from rlsprune.model.product import Product
from rlsprune.model.tensors import exact
from rlsprune.prune.criteria import product_norms, weight_norms
from rlsprune.shrinking.elimination import Curve, FixedScores, Reader, ReaderInRows, UnitReader, eliminate
from rlsprune.shrinking.leastsquares import MOST_INPUTS
from rlsprune.shrinking.rebuild import DAMPING, Calibration, affine_of, can_shift, draw_places, gather_rows
from rlsprune.shrinking.replay import Replay, Stop, closing
from rlsprune.statistics.inverse import from_rows
from rlsprune.statistics.rows import input_rows

__all__ = ["Eliminations", "find_curves"]

_ROWS_IN_ROWS = 2048  # of a layer with too many inputs for a matrix of them


@dataclass
class _Seen:
    """What all calls that use one weight have seen."""

    rows: list[Tensor] = field(default_factory=list)
    weights: Tensor | None = None
    """As a matrix, ``(groups, n, outputs)``, with the shift as last row where there is one."""
    scale: Tensor | None = None
    """How much the error of each output counts."""
    variance: float = 0.0

    def matrix(self) -> Tensor:
        """All rows, ``(groups, m, n)``, with a last 1 where the layer's output can be shifted."""
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, dim=1)

    def own_share(self) -> float:
        """What the layer itself adds of the variance that errors are measured by: all of it, or part of a sum."""
        if self.weights is None or self.scale is None:
            return 1.0
        made = (self.matrix() @ self.weights.to(self.rows[0])) * self.scale.view(len(self.weights), 1, -1)
        return min(1.0, float(made.float().var(1).sum()) / max(self.variance, torch.finfo(torch.float32).tiny))


@dataclass
class Eliminations:
    """What a look at the whole network tells."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Name of a group → how it can be cut."""
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
    """Finds for each group the order in which its units go, and what that costs.

    The network runs once, stopped at every layer; the inputs of one layer are held at a time, or of all that read one
    group.

    Args:
        whole: In evaluation mode.
        graph: Its groups.
        sites: Its layers' calls.
        batches: Inputs.
        products: Name of a group of dimensions of queries and keys → second moments of both, head by head.
        on_layer: Told each layer's name, and how many are done of how many.
    """
    names = layer_names(whole)
    modules = dict(whole.named_modules())
    groups = list(graph)
    attended = {group.name: _output_projections(group, groups) for group in groups}
    waiting = {group.name: {_home(member, modules, names) for member in attended[group.name]} for group in groups}
    wanted = set().union(*waiting.values()) if waiting else set()
    calls = Counter(site.layer for site in sites.values() if site.layer in wanted)
    seen: dict[str, _Seen] = {}
    choice = Eliminations()
    curves = choice.curves
    lanes = batches.lanes(sites)

    def settle(done: set[str], final: bool = False) -> None:
        for group in groups:
            if group.name not in curves and (final or waiting[group.name] <= done):
                readers = [_reader(member, seen.get(_home(member, modules, names))) for member in group.consumers]
                if group.products:
                    reading = [seen.get(_home(member, modules, names)) for member in attended[group.name]]
                    readers.append(_score_reader(group, products.get(group.name), reading))
                curves[group.name] = eliminate(readers, group.size)
        needed = set().union(*(waiting[group.name] for group in groups if group.name not in curves))
        for name in [name for name in seen if name not in needed]:
            del seen[name]

    watched = {key: site for key, site in sites.items() if site.layer in wanted}
    replay = Replay(whole, watched, batches.calls, ahead=False)
    done: set[str] = set()
    with closing(replay):
        for number, key in enumerate(watched, 1):
            stops = replay.advance(lanes[key])
            if not stops:
                break
            site = stops[0].site
            on_layer(site.layer, number, len(watched))
            norms = [modules[name] for name in site.norms]
            after = modules[site.layer_norm] if site.layer_norm is not None else None
            _look(seen.setdefault(site.layer, _Seen()), stops, norms, after, number)
            calls[site.layer] -= 1
            if not calls[site.layer]:
                done.add(site.layer)
                if site.shared:
                    choice.shared[site.layer] = _autocorrelation(seen[site.layer].matrix())
                settle(done)
    settle(done, final=True)
    return choice


def _home(member: Member, modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> str:
    """The layer that calls are counted under: the first with that weight."""
    return names.get(id(modules[member.name]._parameters.get("weight")), member.name)


def _look(
    seen: _Seen, stops: Sequence[Stop], norms: Sequence[nn.Module], layer_norm: nn.Module | None, seed: int
) -> None:
    places = draw_places(stops, seed)
    pairs = list(zip(stops, places, strict=True))
    seen.rows.append(gather_rows(stops, places, can_shift(stops[0].product, norms)))
    results = torch.cat([stop.product.at(stop.result, where) for stop, where in pairs if stop.result is not None])
    scale, _ = affine_of(norms, results)
    if not stops[0].site.sums:
        results = results * scale
    if isinstance(layer_norm, nn.LayerNorm):
        # What errors are after it: some channels of a transformer are a hundred times as large as others before it.
        variances = results.float().var(1, correction=0) + layer_norm.eps
        scale = scale * layer_norm.weight.detach().abs().to(scale) * variances.reciprocal().mean().sqrt().to(scale)
        results = layer_norm(results)
    seen.scale, seen.weights = scale, _with_bias(stops[0].product, seen.rows[0].shape[2])
    seen.variance += float(results.float().var(0).sum()) if len(results) > 1 else 0.0


def _output_projections(group: Group, groups: Sequence[Group]) -> Sequence[Member]:
    """The layers that read a group, or the attention that it is a part of: queries and keys have none of their own."""
    if group.consumers or group.attention is None:
        return group.consumers
    name = group.attention.name
    return next((own.consumers for own in groups if own.consumers and own.attention and own.attention.name == name), ())


def _score_reader(group: Group, moments: tuple[Tensor, Tensor] | None, reading: Sequence[_Seen | None]) -> UnitReader:
    """The scores of attention, which read keys with queries as weights, head by head.

    What is lost of their variance is thought to be lost of the attention's output: as much of what reads it.
    """
    share = max((seen.own_share() for seen in reading if seen is not None), default=1.0)
    if moments is None:
        scores = sum(map(product_norms, group.products), start=torch.zeros(group.size, dtype=torch.float64))
        return FixedScores(share * scores / scores.sum().clamp_min(torch.finfo(torch.float64).tiny))
    queries, keys = moments
    variance = (queries * keys).sum((1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    weights = torch.linalg.cholesky(queries) * (share / (len(queries) * variance)).sqrt()[:, None, None]
    rows = torch.arange(group.size).view(1, -1, 1).expand(len(queries), -1, 1)
    return Reader(keys, weights, rows)


def _reader(member: Member, seen: _Seen | None) -> UnitReader:
    """A consumer of a group; without its inputs it is known by its weights alone."""
    if seen is None or seen.scale is None or seen.weights is None:
        norms = weight_norms(member, 2)
        return FixedScores(norms / norms.sum().clamp_min(torch.finfo(torch.float64).tiny))
    rows = seen.matrix()
    groups, count, width = rows.shape
    counts = exact(seen.scale).view(groups, 1, -1) / max(seen.variance, torch.finfo(torch.float32).tiny) ** 0.5
    matrix, index = seen.weights, input_rows(member.module, member.index)
    if width > MOST_INPUTS and groups == 1:
        part = rows[0, :: max(1, count // _ROWS_IN_ROWS)]
        return ReaderInRows(from_rows(part, DAMPING), (matrix * counts)[0], index[0])
    return Reader(_autocorrelation(rows), matrix * counts, index)


def _with_bias(product: Product, width: int) -> Tensor:
    matrix = exact(product.matrix)
    if width == matrix.shape[1]:
        return matrix
    last = matrix.new_zeros(len(matrix), 1, matrix.shape[2])
    if product.bias is not None:
        last = exact(product.bias.detach()).view_as(last)
    return torch.cat([matrix, last], dim=1)


def _autocorrelation(rows: Tensor) -> Tensor:
    """``XᵀX/m``, damped."""
    result = exact(rows.mT @ rows) / rows.shape[1]
    mean_square = max(float(rows.square().mean()), torch.finfo(torch.float32).tiny)
    result.diagonal(dim1=-2, dim2=-1).add_(DAMPING * mean_square)
    return result
