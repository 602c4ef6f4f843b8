"""Removes channels from a network, layer after layer: those that scores choose, or those that a plan names.

This module undoes nothing on errors; `rlsprune.prune.operation` does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rlsprune.graph import ChannelGraph, Group, plan_cuts
from rlsprune.model.interrupts import stop_if_interrupted
from rlsprune.model.selector import select_inputs
from rlsprune.model.tensors import complement
from rlsprune.prune.criteria import criterion
from rlsprune.prune.refit import KnownInverses, compensate, cut_inverses
from rlsprune.prune.select import choose_units, rounds
from rlsprune.prune.settings import Settings
from rlsprune.prune.surgery import LiveNetwork

__all__ = ["cut_by_scores", "cut_planned"]


@torch.no_grad()
def cut_by_scores(
    network: LiveNetwork, settings: Settings, inverses: KnownInverses, multiple: int
) -> dict[str, list[int]]:
    """Prunes layers 1…L, each scored after the previous one was pruned (Algorithm 1).

    Args:
        network: The network to cut.
        settings: The settings of the event.
        inverses: P of each group of a layer, for scores and compensation; it is cut, too.
        multiple: The free multiple: layers keep a multiple of this many units unless the settings ask for another.

    Returns:
        Name of a group → the units that went, numbered as before the event.
    """
    graph, score = network.graph, criterion(settings.criterion, inverses)
    removed: dict[str, list[int]] = {}
    for name, done in _last_readers(graph).items():
        left = list(range(graph[name].size))
        for choice in rounds(graph[name], settings, multiple):
            stop_if_interrupted()
            group = graph[name]
            units = choose_units(name, score(group), group.size, *choice)
            network.agree(f"which channels of {name!r} go", units)
            if units:
                _remove(network, group, units, settings, inverses)
                removed.setdefault(name, []).extend(left[unit] for unit in units)
                left = [left[unit] for unit in complement(group.size, torch.tensor(units)).tolist()]
        for layer in done:
            inverses.forget(layer)
    return {name: sorted(units) for name, units in removed.items()}


@torch.no_grad()
def cut_planned(
    network: LiveNetwork, planned: Mapping[str, list[int]], settings: Settings, inverses: KnownInverses
) -> dict[str, list[int]]:
    """Prunes units that are chosen already, and returns them.

    Args:
        network: The network to cut.
        planned: Name of a group → its units that go.
        settings: The settings of the event.
        inverses: P of each group of a layer; it is cut, too. P of layers that read the network's input is kept.
    """
    graph = network.graph
    read_inputs = {member.name for group in graph if group.is_input for member in group.consumers}
    for name, done in _last_readers(graph).items():
        stop_if_interrupted()
        if name in planned:
            _remove(network, graph[name], planned[name], settings, inverses)
        for layer in done - read_inputs:
            inverses.forget(layer)
    return dict(planned)


def _remove(network: LiveNetwork, group: Group, units: list[int], settings: Settings, inverses: KnownInverses) -> None:
    """Removes units: refits the layers that read them, and cuts weights, P and the optimizer's state."""
    removals = inverses.remove(group, units, ask=settings.compensate)
    for model in network.models:
        if settings.compensate:
            compensate(model, group, removals)
        for member in group.consumers if group.is_input else ():
            layer = model.get_submodule(member.name)
            assert isinstance(layer, nn.Linear)
            select_inputs(layer, complement(layer.in_features, member.index[units].flatten()))
    cuts = plan_cuts([(group, units)])
    known = removals if settings.statistics == "training" else {}
    cut_inverses(network.model, network.optimizer, cuts, settings.inverse, known)
    network.cut(cuts)


def _last_readers(graph: ChannelGraph) -> dict[str, set[str]]:
    """Returns for each group, by name and in order, the layers that read it and none of the groups after it."""
    readers = {group.name: {member.name for member in group.consumers} for group in graph}
    return {name: readers.pop(name).difference(*readers.values()) for name in list(readers)}
