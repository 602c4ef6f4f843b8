"""Makes events: what goes and where, all or nothing, on all ranks alike. When is the pruner's business."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rlsprune.distributed.ddp import rebuild
from rlsprune.distributed.fingerprint import fingerprint
from rlsprune.distributed.ranks import find_ranks
from rlsprune.graph import ChannelGraph, find_groups
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.modes import evaluating
from rlsprune.model.tensors import forget_compiled_code
from rlsprune.optim.rls import RLS
from rlsprune.prune.allocation import STEPS, spread
from rlsprune.prune.budget import Budget
from rlsprune.prune.criteria import InverseOf
from rlsprune.prune.event import LayerChange, PruneEvent
from rlsprune.prune.operation import operate, undone_on_error
from rlsprune.prune.refit import KnownInverses
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.source import InverseSource
from rlsprune.prune.surgery import inner

# How often the last event's ratio is halved towards the target.
_TARGET_STEPS = 5

Evaluate = Callable[[], float]
"""Gives the loss of the network as it is on held-out data."""


class Surgeon:
    """Cuts a network, its copies and its optimizer's state, and can put back what was cut.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        optimizer: Of its parameters.
        example_inputs: What the network is called with.
        settings: What an event chooses, and how it removes that.
        ignore: Names of layers that keep all their channels.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: ExampleInputs,
        settings: Settings,
        ignore: str | Iterable[str],
    ) -> None:
        self._ranks = optimizer.ranks if isinstance(optimizer, RLS) else find_ranks(model)
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer, self._example_inputs, self.settings = optimizer, example_inputs, settings
        self._ignore = ignore if isinstance(ignore, str) else tuple(ignore)
        self._known_graph: ChannelGraph | None = self._find_graph()
        self.inverses = InverseSource(self._model, optimizer, settings, self._ranks)
        """Where P comes from."""
        self.copies: list[nn.Module] = []
        """Networks that are cut alike."""
        self.budget = Budget(self._model, example_inputs, settings.target)

    @property
    def graph(self) -> ChannelGraph:
        """The channels that can go, as they are now."""
        if self._known_graph is None:
            self._known_graph = self._find_graph()
        return self._known_graph

    def prunes_inputs(self) -> bool:
        """Whether features of the input may go."""
        return any(group.is_input and self.settings.ratio_of(group) for group in self.graph.groups)

    def prune(
        self, epoch: int, loss: float | None, evaluate: Evaluate | None, preview: bool = False
    ) -> PruneEvent | None:
        """Makes one event, no larger than the target asks for, or tells what it would be.

        Args:
            epoch: That it is put down for.
            loss: That it is put down with.
            evaluate: Tells where cutting costs least; None for the same share of every layer.
            preview: Undo it.

        Returns:
            The event; None if nothing may go.
        """
        with self._operation() as undo:
            before = self._measure()
            removed = self._cut_within_target(evaluate, undo)
            event = self._describe("preview" if preview else "prune", epoch, loss, before, removed) if removed else None
            if preview:
                undo()
        return event

    def snapshots(self) -> list[Snapshot]:
        """The network, with its optimizer, and its copies, as they are now."""
        return [
            Snapshot(self._model, self._optimizer, copy=True),
            *(Snapshot(inner(follower), copy=True) for follower in self.copies),
        ]

    def roll_back(self, snapshots: Iterable[Snapshot], epoch: int, loss: float | None) -> PruneEvent:
        """Puts back what snapshots hold."""
        before = self._measure()
        for snapshot in snapshots:
            snapshot.restore()
        self._rebuild_wrapper()
        self._known_graph = None  # it was the smaller network's
        return self._describe("roll-back", epoch, loss, before, {})

    def reached(self) -> bool:
        """Whether a target is reached: one answer for all ranks, of which each measures another latency."""
        reached = self.budget.reached()
        return reached if self._ranks is None else self._ranks.first(reached)

    def mean(self, loss: float) -> float:
        """Of all ranks."""
        return loss if self._ranks is None else math.fsum(self._ranks.gather(loss)) / self._ranks.size

    # --- one event ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _operation(self) -> Iterator[Callable[[], None]]:
        """All or nothing, on all ranks alike; yields what undoes everything so far."""
        self._meet()
        try:
            with undone_on_error(self._model, self._optimizer, self.copies, self.graph) as undo:
                yield undo
        finally:
            self._rebuild_wrapper()

    def _meet(self) -> None:
        """Broadcasts what ranks may compute differently, buffers and factors of P; stops if they differ otherwise."""
        if self._ranks is None:
            return
        buffers = [buffer for network in (self._model, *self.copies) for buffer in network.buffers()]
        factors = self._optimizer.inverse_tensors(factors_only=True) if isinstance(self._optimizer, RLS) else []
        self._ranks.agree("the network", fingerprint(self._model, self._optimizer, values=False))
        self._ranks.spread([[*buffers, *factors]])
        self._ranks.agree("the network", fingerprint(self._model, self._optimizer))

    def _cut_within_target(self, evaluate: Evaluate | None, undo: Callable[[], None]) -> dict[str, list[int]]:
        """Cuts, with the ratios lowered to where the target is just reached if they would go beyond."""
        aims = self.budget.countable and not self.budget.reached()
        # Trials begin with the same network.
        source = cache(self.inverses) if aims or evaluate is not None else self.inverses
        settings = self.settings if evaluate is None else self._spread(source, evaluate, undo)
        removed = self._cut(settings, KnownInverses(source))
        if not removed or not aims or not self.budget.reached():
            return removed
        too_little, enough = 0.0, 1.0
        for _ in range(_TARGET_STEPS):
            share = (too_little + enough) / 2
            undo()
            if self._cut(settings.scaled(share), KnownInverses(source)) and self.budget.reached():
                enough = share
            else:
                too_little = share
        undo()
        return self._cut(settings.scaled(enough), KnownInverses(source))

    def _spread(self, source: InverseOf, evaluate: Evaluate, undo: Callable[[], None]) -> Settings:
        """The settings of an event, with the ratios that cutting each layer on trial suggests."""

        def loss() -> float:
            # It leaves no trace: no gradients, and no statistics of batch norms or inputs.
            forget_compiled_code()
            with evaluating(self._model, *self.copies):
                return self.mean(float(evaluate()))

        def trial(settings: Settings, name: str) -> list[tuple[int, float]]:
            inverses = KnownInverses(source)
            results: list[tuple[int, float]] = []
            with contextlib.suppress(FloatingPointError):  # there is no going further then
                while len(results) < STEPS and self._cut(settings, inverses):
                    results.append((self.graph[name].size, loss()))
            undo()
            return results

        return spread(self.settings, self.graph.groups, self.budget.tensors(), loss(), trial)

    def _cut(self, settings: Settings, inverses: KnownInverses) -> dict[str, list[int]]:
        return operate(self._model, self._optimizer, self.copies, self.graph, settings, inverses, self._ranks)

    def _rebuild_wrapper(self) -> None:
        if self._wrapper is not None:
            rebuild(self._wrapper)

    def _find_graph(self) -> ChannelGraph:
        graph = find_groups(self._model, self._example_inputs, self._ignore)
        if not graph.groups:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in graph.skipped.items())
            raise ValueError(f"the model has nothing to prune. {reasons}")
        self.settings.check_graph(graph)
        return graph

    # --- what it was, in numbers --------------------------------------------------------------------------------------

    def _measure(self) -> _Measures:
        return _Measures(self.budget.costs(), self._sizes())

    def _describe(
        self,
        kind: Literal["prune", "roll-back", "preview"],
        epoch: int,
        loss: float | None,
        before: _Measures,
        removed: dict[str, list[int]],
    ) -> PruneEvent:
        after = self._measure()
        return PruneEvent(
            epoch=epoch,
            loss=loss,
            params_before=before.costs["params"],
            params_after=after.costs["params"],
            flops_before=before.costs["flops"],
            flops_after=after.costs["flops"],
            layers=tuple(LayerChange(name, size, after.sizes[name]) for name, size in before.sizes.items()),
            removed=removed,
            kind=kind,
        )

    def _sizes(self) -> dict[str, int]:
        """Output channels of every layer that has them, and what is left of the input features."""
        sizes = {group.name: group.size for group in self.graph.groups if group.is_input}
        for name, module in self._model.named_modules():
            size = getattr(module, "out_features", getattr(module, "out_channels", None))
            if isinstance(size, int):
                sizes[name] = size
        return sizes


class _Measures(NamedTuple):
    costs: Mapping[str, int]
    sizes: Mapping[str, int]
