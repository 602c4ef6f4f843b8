"""One pruning event, all or nothing: choose, compensate and cut, layer after layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from rlsprune.distributed.ranks import Ranks
from rlsprune.graph import ChannelGraph, Group, plan_cuts
from rlsprune.model.selector import select_inputs
from rlsprune.model.tensors import complement
from rlsprune.prune.criteria import criterion
from rlsprune.prune.refit import KnownInverses, compensate, cut_inverses
from rlsprune.prune.select import choose_units, cut_size, most_to_go
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts, inner

# Up to this share of a layer goes at once, more in so many rounds. More rounds did not leave more precision.
_AT_ONCE, _ROUNDS = 0.2, 4


def operate(
    model: nn.Module,
    optimizer: Optimizer,
    copies: list[nn.Module],
    graph: ChannelGraph,
    settings: Settings,
    inverses: KnownInverses,
    ranks: Ranks | None = None,
) -> dict[str, list[int]]:
    """Prunes layers 1…L, each scored after the one before was pruned (Algorithm 1). Not undone on errors.

    Args:
        model: The network.
        optimizer: Whose state is cut with it.
        copies: Copies of the network, cut alike.
        graph: Its groups, renumbered as units go.
        settings: What to choose and how to remove it.
        inverses: P of each group of a layer, for scores and compensation; smaller after it.
        ranks: The processes that prune the same network, and have to choose the same units.

    Returns:
        Name of a group → the units that went, numbered as before the event.
    """
    score = criterion(settings.criterion, inverses)
    removed: dict[str, list[int]] = {}
    with torch.no_grad():
        for name in [group.name for group in graph]:
            left = list(range(graph[name].size))
            for choice in _rounds(graph[name], settings):
                group = graph[name]
                units = choose_units(name, list(score(group)), group.size, *choice)
                if ranks is not None:
                    ranks.agree(f"which channels of {name!r} go", units)
                if units:
                    _remove(graph, group, units, model, optimizer, copies, settings, inverses)
                    removed.setdefault(name, []).extend(left[unit] for unit in units)
                    left = [left[unit] for unit in complement(group.size, torch.tensor(units)).tolist()]
    return {name: sorted(units) for name, units in removed.items()}


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


def _rounds(group: Group, settings: Settings) -> list[tuple[float, int, int]]:
    """Ratio, units that stay at least, and what their number is a multiple of, for each round in which units go.

    Of two channels that stand in for each other, each scores low as long as the other is there. So where a large share
    goes by such scores, it goes in rounds, each scored after the refit of the one before.
    """
    ratio = settings.ratio_of(group)
    if not cut_size(ratio, group.size):
        return []
    keep, round_to = (1, 1) if group.is_input else (settings.min_channels, settings.round_to)
    if settings.criterion != "obs" or not settings.compensate or ratio <= _AT_ONCE:
        return [(ratio, keep, round_to)]
    going = most_to_go(group.size, cut_size(ratio, group.size), keep, round_to)
    gone = [going * number // _ROUNDS for number in range(_ROUNDS + 1)]
    return [((after - before) / (group.size - before), 1, 1) for before, after in pairwise(gone) if after > before]


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
