"""The network before an event, by which units are chosen and to which the smaller one is refitted.

Events of networks with batch norms work like the cuts of `rlsprune.shrink`: the inputs that the network has just seen
score the channels, and are those that every layer is refitted on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph import Group, plan_cuts
from rlsprune.graph.sites import find_sites
from rlsprune.model.calls import bare_copy
from rlsprune.model.interrupts import stop_if_interrupted
from rlsprune.model.modes import evaluating, forked_random_state, kept_buffers
from rlsprune.prune.allocation import Costs, most_gone
from rlsprune.prune.choice import find_curves
from rlsprune.prune.elimination import Curve
from rlsprune.prune.select import cut_size
from rlsprune.prune.settings import Settings
from rlsprune.prune.surgery import LiveNetwork
from rlsprune.prune.widths import choose_widths
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.reconstruction.norms import make_consistent
from rlsprune.reconstruction.rebuild import rebuild

__all__ = ["Original", "has_batch_norms"]


def has_batch_norms(model: nn.Module) -> bool:
    """Whether the model has batch norms with running statistics, so that events refit it as a whole."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is not None for module in model.modules())


class Original:
    """A network and its copies as they are before an event.

    Args:
        network: The network, not cut yet.
        batches: The inputs that it was called with.

    Raises:
        ValueError: The network cannot be copied.
    """

    def __init__(self, network: LiveNetwork, batches: Calibration) -> None:
        self._network, self._batches = network, batches
        self._wholes = [bare_copy(model).eval() for model in network.models]
        whole = self._wholes[0]
        self._graph = network.graph.moved_to(dict(zip(network.model.modules(), whole.modules(), strict=True)))
        with forked_random_state(whole), evaluating(whole):
            self._sites = find_sites(whole, batches.calls[0])

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Returns for each group, by name, the order in which its units go, and the costs.

        Raises:
            ValueError: The network calls different layers for different inputs, or has numbers that are not finite.
        """
        whole = self._wholes[0]
        with forked_random_state(whole), evaluating(whole):
            return find_curves(
                whole, self._graph, self._sites, self._batches, {}, lambda *_: stop_if_interrupted()
            ).curves

    def plan(
        self, settings: Settings, tensors: Mapping[str, float], enough: float, multiple: int
    ) -> dict[str, list[int]]:
        """Returns the units that go. They save as much as ξ of every group would, with the least error.

        Args:
            settings: The settings, with the ξ of every group.
            tensors: Name of a parameter → its cost.
            enough: Cost that meets the target; the plan aims at no lower one.
            multiple: The number of units that stay is a multiple of this. Unless ``round_to`` is set, it is halved
                until something can go.

        Returns:
            Name of a group → its units that go, without features of the input.
        """
        groups = [group for group in self._graph if group.size > 1 and not group.is_input and settings.ratio_of(group)]
        costs = Costs(tensors, groups)
        goal = max(costs.without({group.name: _share(group, settings) for group in groups}), enough)
        curves = {group.name: _bounded(self.curves[group.name], group, settings) for group in groups}
        gone: dict[str, int] = {}
        while goal < costs.without({}) and not any(gone.values()) and multiple:
            gone = choose_widths(curves, groups, costs, goal, least=settings.min_channels, round_to=multiple)
            multiple = multiple // 2 if settings.round_to is None else 0
        return {name: sorted(curves[name].order[:count]) for name, count in gone.items() if count}

    def refit(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Refits the network after a cut, layer by layer, and its batch norms.

        A copy that does not run on these inputs stays as it is.

        Args:
            removed: Name of a group → its units that went, numbered as before the event.

        Raises:
            ValueError: The network does not run on these inputs, or calls different layers for different inputs. It is
                then left as it was after the cut.
        """
        kept = plan_cuts([(self._graph[name], units) for name, units in removed.items()]).outputs
        network = self._network
        for whole, cut, snapshot in zip(self._wholes, network.models, network.snapshots(copy=False), strict=True):
            others = [module for module in cut.modules() if not isinstance(module, _BatchNorm)]
            with forked_random_state(cut), kept_buffers(others):
                try:
                    with evaluating(cut):
                        rebuild(whole, cut, self._sites, kept, self._batches, on_layer=lambda *_: stop_if_interrupted())
                    make_consistent(cut, self._batches.calls, before=whole, kept=kept)
                except ValueError:
                    snapshot.restore()
                    if cut is network.model:
                        raise


def _share(group: Group, settings: Settings) -> float:
    return cut_size(settings.ratio_of(group), group.size) / group.size


def _bounded(curve: Curve, group: Group, settings: Settings) -> Curve:
    """Returns the curve with infinite costs beyond the largest number of units that an event removes from a group."""
    most = int(most_gone(settings.ratio_of(group)) * group.size)
    return curve._replace(costs=[cost if gone <= most else math.inf for gone, cost in enumerate(curve.costs)])
