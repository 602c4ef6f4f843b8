"""One prune event, from the first score to the smaller tensors: choose, compensate and cut, layer after layer.

Read from the top: `Operation.run` makes an event, all or nothing; `_cut_within_limits` keeps it from going past the
target and from harm; `_allocated` finds out what each layer can spare, if a held-out loss is there to ask; `_cut` is
Algorithm 1's loop over the layers; `_remove` takes one choice of units out of everything that has them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from rlsprune.graph import ChannelGraph, Group, plan_cuts
from rlsprune.model.arguments import check_iterable, one_number
from rlsprune.model.calls import ExampleInputs, measurable
from rlsprune.model.interrupts import interruptible, stop_if_interrupted
from rlsprune.model.modes import evaluate, evaluating, full_precision, refuse_inference_mode, run_once
from rlsprune.model.progress import shown_progress, watched
from rlsprune.model.selector import select_inputs
from rlsprune.model.tensors import complement, forget_compiled_code
from rlsprune.optim.rls import RLS
from rlsprune.prune.allocation import STEPS, allocate
from rlsprune.prune.budget import Budget
from rlsprune.prune.criteria import InverseOf, criterion
from rlsprune.prune.event import Measures, PruneEvent
from rlsprune.prune.original import Original, has_batch_norms
from rlsprune.prune.refit import KnownInverses, compensate, cut_inverses
from rlsprune.prune.rounding import free_multiple
from rlsprune.prune.select import choose_units, rounds
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import LiveNetwork
from rlsprune.reconstruction.recent import RecentInputs
from rlsprune.statistics.inputs import InputStatistics
from rlsprune.statistics.inverse import Inverse, inverses_of

HeldOutLoss = Callable[[], float]
"""Gives the loss of the network as it is on held-out data."""

# How often the ratios of an event are halved towards the target, or towards what the held-out loss can bear.
_HALVINGS = 5
# An event may raise the held-out loss by this share of it. The share of wrong answers rises about as much.
_MOST_INCREASE = 0.25


class Operation:
    """Makes events on one network. When to make one is the pruner's business.

    Args:
        network: What is cut.
        example_inputs: What the network is called with.
        settings: What an event chooses, and how it removes that.
    """

    def __init__(self, network: LiveNetwork, example_inputs: ExampleInputs, settings: Settings) -> None:
        settings.check_graph(network.graph)
        self._free_multiple = 1
        if settings.round_to is None and "latency" in settings.target:
            plain = measurable(network.model)
            self._free_multiple = network.first(free_multiple(plain, example_inputs, network.graph))
        self.network, self.settings = network, settings
        self._example_inputs = example_inputs
        self.budget = Budget(network.model, example_inputs, settings.cost_target)
        self._closed = False
        sampled = settings.needs_inverse and settings.statistics == "exact"
        # Last: an error before it leaves no hook behind.
        self._sample = InputStatistics(network.model, ranks=network.ranks) if sampled else None
        alone = network.ranks is None and not network.divided
        refitted = settings.compensate and alone and has_batch_norms(network.model)
        self._recent = RecentInputs(network.model, self._sample.watches) if self._sample and refitted else None

    # --- one event ----------------------------------------------------------------------------------------------------

    def run(
        self, epoch: int, loss: float | None, held_out_loss: HeldOutLoss | None, *, preview: bool = False
    ) -> PruneEvent | None:
        """Makes an event; an error, or Ctrl-C until its last check has passed, leaves everything as it was.

        Args:
            epoch: Its number.
            loss: What opened the gate; None by hand.
            held_out_loss: With it, how much each layer loses depends on what that costs.
            preview: Undo it at the end.

        Returns:
            The event; None if no unit may go.
        """
        network = self.network
        refuse_inference_mode("a prune")
        if self._closed:
            raise RuntimeError("this pruner was closed: make a new one to go on pruning")
        network.check_unchanged()
        network.meet()
        try:
            with full_precision(network.model), network.undone_on_error() as undo:
                before = self.measures()
                removed = self._cut_within_limits(held_out_loss, undo)
                if removed:
                    self._check_that_it_runs()
                after = self.measures()
                stop_if_interrupted()
                self.network.agree("what is left after the event", after.params)  # or all ranks undo it
                if preview:
                    undo()
        finally:
            network.rebuild_wrapper()
        if not removed:
            return None
        return PruneEvent.between(before, after, epoch, loss, "preview" if preview else "prune", removed)

    def roll_back(self, snapshots: Iterable[Snapshot], epoch: int, loss: float | None) -> PruneEvent:
        """Puts back what snapshots hold, all of it or nothing."""
        before = self.measures()
        try:
            with full_precision(self.network.model), self.network.undone_on_error():
                self.network.restore(snapshots)
                after = self.measures()
                stop_if_interrupted()
        finally:
            self.network.rebuild_wrapper()
        return PruneEvent.between(before, after, epoch, loss, "roll-back", {})

    def _cut_within_limits(self, held_out_loss: HeldOutLoss | None, undo: Callable[[], None]) -> dict[str, list[int]]:
        """Cuts, with the ratios lowered to where the target is just reached, and to what the held-out loss can bear."""
        aims = self.budget.countable and not self.budget.reached()
        # Trials begin with the same network.
        source = cache(self._inverses) if aims or held_out_loss is not None else self._inverses
        settings, most = self.settings, math.inf
        if held_out_loss is not None:
            before = self._loss(held_out_loss)
            settings, most = self._allocated(source, held_out_loss, before, undo), before + _MOST_INCREASE * abs(before)
        if "inputs" in settings.target and settings.cost_target and self.budget.reached():
            settings = self._inputs_alone(settings)
        by_curves = settings.criterion == "obs" and held_out_loss is None
        original = self._original(by_curves)
        tensors = self.budget.aimed_tensors()

        def attempt(share: float) -> dict[str, list[int]]:
            undo()
            smaller, inverses = settings.scaled(share), KnownInverses(source)
            if original is None or not by_curves:
                return self._cut(smaller, inverses)
            planned = original.plan(smaller, tensors, settings.round_to or self._free_multiple)
            removed = self._cut_planned(planned, smaller, inverses)
            return removed | self._cut(self._inputs_alone(smaller), inverses) if self.prunes_inputs() else removed

        removed, share = attempt(1.0), 1.0
        if removed and aims and self.budget.reached():
            share = _boundary(lambda tried: bool(attempt(tried)) and self.budget.reached(), share)[1]
            removed = attempt(share)

        def does_harm() -> bool:
            return held_out_loss is not None and not self._loss(held_out_loss) <= most

        def refit() -> None:
            if original is not None and removed:
                original.refit(removed)

        refit()
        if removed and does_harm():
            harmless, least = _boundary(lambda tried: bool(attempt(tried)) and does_harm(), share)
            # If even the smallest cut that was tried does harm, that one it is: pruning would not go on without.
            removed = (attempt(harmless) if harmless else {}) or attempt(least)
            refit()
        return removed

    def _loss(self, held_out_loss: HeldOutLoss) -> float:
        """Asks for the loss of the network as it is, and leaves no trace: no gradients, and no statistics."""
        network = self.network
        forget_compiled_code()
        with evaluating(network.model, *network.copies), interruptible():
            return network.mean(one_number("what held_out_loss gave", held_out_loss()))

    def _inputs_alone(self, settings: Settings) -> Settings:
        """The settings of an event that removes input features only: the rest of the network is small enough."""
        ratios = {group.name: settings.ratio_of(group) for group in self.network.graph if group.is_input}
        return settings.shared_out({name: ratio for name, ratio in ratios.items() if ratio})

    def _allocated(
        self, source: InverseOf, held_out_loss: HeldOutLoss, before: float, undo: Callable[[], None]
    ) -> Settings:
        """The settings of an event, with the ratios that cutting each layer on trial suggests."""
        network = self.network

        def trial(settings: Settings, name: str) -> list[tuple[int, float]]:
            inverses = KnownInverses(source, keep=True)
            results: list[tuple[int, float]] = []
            with contextlib.suppress(FloatingPointError):  # there is no going further then
                while len(results) < STEPS and self._cut(settings, inverses):
                    results.append((network.graph[name].size, self._loss(held_out_loss)))
            undo()
            return results

        return allocate(self.settings, network.graph.groups, self.budget.tensors(), before, trial)

    def _cut(self, settings: Settings, inverses: KnownInverses) -> dict[str, list[int]]:
        """Prunes layers 1…L, each scored after the one before was pruned (Algorithm 1). Not undone on errors.

        Args:
            settings: What to choose and how to remove it.
            inverses: P of each group of a layer, for scores and compensation; smaller after it.

        Returns:
            Name of a group → the units that went, numbered as before the event.
        """
        graph, score = self.network.graph, criterion(settings.criterion, inverses)
        removed: dict[str, list[int]] = {}
        with torch.no_grad():
            for name, done in _last_readers(graph).items():
                left = list(range(graph[name].size))
                for choice in rounds(graph[name], settings, self._free_multiple):
                    stop_if_interrupted()
                    group = graph[name]
                    units = choose_units(name, score(group), group.size, *choice)
                    self.network.agree(f"which channels of {name!r} go", units)
                    if units:
                        self._remove(group, units, settings, inverses)
                        removed.setdefault(name, []).extend(left[unit] for unit in units)
                        left = [left[unit] for unit in complement(group.size, torch.tensor(units)).tolist()]
                for layer in done:
                    inverses.forget(layer)
        return {name: sorted(units) for name, units in removed.items()}

    def _cut_planned(
        self, planned: Mapping[str, list[int]], settings: Settings, inverses: KnownInverses
    ) -> dict[str, list[int]]:
        """Prunes units that are chosen already. Not undone on errors."""
        graph = self.network.graph
        read_inputs = {member.name for group in graph if group.is_input for member in group.consumers}
        with torch.no_grad():
            for name, done in _last_readers(graph).items():
                stop_if_interrupted()
                if name in planned:
                    self._remove(graph[name], planned[name], settings, inverses)
                for layer in done - read_inputs:
                    inverses.forget(layer)
        return dict(planned)

    def _remove(self, group: Group, units: list[int], settings: Settings, inverses: KnownInverses) -> None:
        """Takes units out: refits the layers that read them, and cuts weights, P and the optimizer's state."""
        network = self.network
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

    def _check_that_it_runs(self) -> None:
        """Raises before anything is final if the cut network cannot be called any more."""
        try:
            run_once(self.network.model, self._example_inputs)
        except Exception as error:
            raise RuntimeError(
                f"without the channels chosen the network does not run ({type(error).__name__}: {error}). Everything "
                "is as before; name the layer that needs its width in ignore="
            ) from error

    # --- the network before the event ---------------------------------------------------------------------------------

    def _original(self, choosing: bool) -> Original | None:
        """The network as it is, to refit to and perhaps to choose by, if inputs of it were kept."""
        batches = None if self._recent is None else self._recent.calibration()
        if batches is None:
            return None
        try:
            original = Original(self.network, batches)
            return original if not choosing or original.curves else None
        except (ValueError, FloatingPointError):
            # It cannot be copied, does not run on a part of a batch, or calls other layers for other inputs. What is
            # not finite is told layer by layer.
            return None

    # --- where P comes from -------------------------------------------------------------------------------------------

    def _inverses(self, name: str) -> list[Inverse]:
        """P of each group of a layer: of the sampled inputs, or the optimizer's own."""
        if self._sample is not None:
            return self._sample.inverses(name)
        optimizer = self.network.optimizer
        assert isinstance(optimizer, RLS)
        form = optimizer.form(self.network.model.get_parameter(f"{name}.weight" if name else "weight"))
        if form is None:
            raise RuntimeError(
                f"layer {name!r} has no P yet, which starts with the first step that trains it: train first, or use "
                "statistics='exact'"
            )
        return inverses_of(form)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Samples the inputs that given batches make."""
        if self._sample is None:
            reason = "statistics='training'" if self.settings.needs_inverse else "no P is needed for its settings"
            raise ValueError(f"calibrate() gathers exact statistics, which are not used here ({reason}): leave it out")
        check_iterable("batches", batches, "give a list of batches or a DataLoader")
        with self._sample.everything(), shown_progress() as tell:
            seen = evaluate(self.network.model, watched(batches, "calibrating", tell), self._example_inputs)
        if not seen:
            raise ValueError("calibrate was given no batch: give it some batches of inputs")

    def restart_sample(self, seed: int, active: bool) -> None:
        """Forgets the sample, and starts or stops sampling training forwards, which makes every step dearer."""
        if self._sample is not None:
            self._sample.clear(seed)
            self._sample.active = active
        if self._recent is not None:
            self._recent.clear()

    def close(self) -> None:
        """Removes the hooks from the model; no event can be made after that."""
        self._closed = True
        for watcher in (self._sample, self._recent):
            if watcher is not None:
                watcher.close()

    # --- what the network costs ---------------------------------------------------------------------------------------

    def measures(self) -> Measures:
        """Costs and sizes of the network as it is."""
        costs = self.budget.costs()
        return Measures(costs["params"], costs["flops"], self.network.sizes())

    def target_reached(self) -> bool:
        """Whether a target is reached. Rank 0 decides, as every rank measures another latency."""
        return self.network.first(self.reached())

    def reached(self) -> bool:
        """Whether a cost is as low as the target asks for, and the inputs are as few."""
        settings = self.settings
        few = all(group.size <= settings.least_inputs(group) for group in self.network.graph if group.is_input)
        if "inputs" not in settings.target:
            return self.budget.reached()
        return few and (not settings.cost_target or self.budget.reached())

    def prunes_inputs(self) -> bool:
        """Whether features of the input may go."""
        return any(group.is_input and self.settings.ratio_of(group) for group in self.network.graph)


def _last_readers(graph: ChannelGraph) -> dict[str, set[str]]:
    """Name of a group, in order → the layers that read it and none of the groups after it."""
    readers = {group.name: {member.name for member in group.consumers} for group in graph}
    return {name: readers.pop(name).difference(*readers.values()) for name in list(readers)}


def _boundary(holds: Callable[[float], bool], share: float) -> tuple[float, float]:
    """Finds by bisection where a condition that fails at 0 and holds at a share begins to hold."""
    low, high = 0.0, share
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return low, high
