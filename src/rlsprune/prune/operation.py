"""One pruning event, all or nothing: choose, compensate and cut, layer after layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from rlsprune._tensors import complement
from rlsprune.distributed.ranks import Ranks
from rlsprune.graph import ChannelGraph, Group, plan_cuts
from rlsprune.inputs import select_inputs
from rlsprune.prune.criteria import Criterion, InverseOf, criterion
from rlsprune.prune.refit import KnownInverses, compensate, cut_inverses
from rlsprune.prune.select import choose_units, cut_size
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts, inner


def operate(
    model: nn.Module,
    optimizer: Optimizer,
    copies: list[nn.Module],
    graph: ChannelGraph,
    settings: Settings,
    source: InverseOf,
    ranks: Ranks | None = None,
) -> dict[str, list[int]]:
    """Prunes layers 1…L, each scored after the one before was pruned (Algorithm 1). Not undone on errors.

    Args:
        model: The network.
        optimizer: Whose state is cut with it.
        copies: Copies of the network, cut alike.
        graph: Its groups, renumbered as units go.
        settings: What to choose and how to remove it.
        source: P of each group of a layer, for scores and compensation.
        ranks: The processes that prune the same network, and have to choose the same units.

    Returns:
        Name of a group → the units that went, numbered as before the event.
    """
    inverses = KnownInverses(source)
    score = criterion(settings.criterion, inverses)
    removed: dict[str, list[int]] = {}
    with torch.no_grad():
        for name in [group.name for group in graph]:
            units = _choose(graph[name], settings, score)
            if ranks is not None:
                ranks.agree(f"which channels of {name!r} go", units)
            if units:
                _remove(graph, graph[name], units, model, optimizer, copies, settings, inverses)
                removed[name] = units
    return removed


@contextmanager
def undone_on_error(
    model: nn.Module, optimizer: Optimizer, copies: list[nn.Module], graph: ChannelGraph
) -> Iterator[Callable[[], None]]:
    """An error inside leaves everything as it was; so does calling what it yields."""
    groups = graph.groups
    snapshots = [Snapshot(model, optimizer), *(Snapshot(inner(copy)) for copy in copies)]

    def undo() -> None:
        for snapshot in snapshots:
            snapshot.restore()
        graph.groups = groups

    try:
        yield undo
    except BaseException:
        undo()
        raise


def _choose(group: Group, settings: Settings, score: Criterion) -> list[int]:
    ratio = settings.ratio_of(group)
    if not cut_size(ratio, group.size):
        return []
    keep, round_to = (1, 1) if group.is_input else (settings.min_channels, settings.round_to)
    return choose_units(group.name, list(score(group)), group.size, ratio, keep, round_to)


def _remove(
    graph: ChannelGraph,
    group: Group,
    units: list[int],
    model: nn.Module,
    optimizer: Optimizer,
    copies: list[nn.Module],
    settings: Settings,
    inverses: KnownInverses,
) -> None:
    removals = inverses.remove(group, units, ask=settings.compensate)
    for network in (model, *map(inner, copies)):
        if settings.compensate:
            compensate(network, group, removals)
        for member in group.consumers if group.is_input else ():
            layer = network.get_submodule(member.name)
            assert isinstance(layer, nn.Linear)
            select_inputs(layer, complement(layer.in_features, member.index[units].flatten()))
    cuts = plan_cuts([(group, units)])
    cut_inverses(model, optimizer, cuts, settings.inverse, removals if settings.statistics == "training" else {})
    apply_cuts(model, cuts, optimizer, copies)
    graph.shrink(cuts)
