"""One prune event, from the first score to the smaller tensors: choose, compensate and cut, layer after layer.

Read from the top: `Operation.run` makes an event, all or nothing. `_cut_within_limits` keeps it from overshooting the
target and from raising the held-out loss too far. `_allocated` measures how much each layer can lose, if there is a
held-out loss. `cutting` has Algorithm 1's loop over the layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from rlsprune.model.arguments import one_number
from rlsprune.model.calls import ExampleInputs, measurable
from rlsprune.model.interrupts import interruptible, stop_if_interrupted
from rlsprune.model.modes import evaluating, outside_autocast, refuse_inference_mode, run_once
from rlsprune.model.tensors import forget_compiled_code
from rlsprune.prune.allocation import STEPS, allocate
from rlsprune.prune.budget import Budget
from rlsprune.prune.criteria import InverseOf
from rlsprune.prune.cutting import cut_by_scores, cut_planned
from rlsprune.prune.event import Measures, PruneEvent, Refit
from rlsprune.prune.evidence import Evidence
from rlsprune.prune.original import Original
from rlsprune.prune.refit import KnownInverses
from rlsprune.prune.rounding import free_multiple
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import LiveNetwork

HeldOutLoss = Callable[[], float]
"""A function that returns the present loss of the network on held-out data."""

# Steps of the bisection that finds the ratios at which the target is just met, or the held-out loss just acceptable.
_HALVINGS = 5
# An event may raise the held-out loss by this share of it. The error rate rises by about the same share.
_MOST_INCREASE = 0.25


class Operation:
    """Makes events on one network. The pruner decides when.

    Args:
        network: The network to cut.
        example_inputs: Inputs of the network.
        settings: The settings of the events.
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
        self.not_whole: str | None = None
        """The reason why the last event was refitted layer by layer, if other events of this network are not."""
        self.evidence = Evidence(network, example_inputs, settings)  # last: an error before it leaves no hook behind

    # --- one event ----------------------------------------------------------------------------------------------------

    def run(
        self, epoch: int, loss: float | None, held_out_loss: HeldOutLoss | None, *, preview: bool = False
    ) -> PruneEvent | None:
        """Makes an event. An error, or Ctrl-C before the last check has passed, leaves everything as it was.

        Args:
            epoch: The number of the epoch.
            loss: The loss that opened the gate; None for an event by hand.
            held_out_loss: The held-out loss by which the event is allocated over the layers; None to do without.
            preview: Whether to undo the event at the end.

        Returns:
            The event; None if no unit may go.
        """
        network = self.network
        refuse_inference_mode("a prune")
        if self._closed:
            raise RuntimeError("this pruner was closed: make a new one to go on pruning")
        network.check_unchanged()
        network.meet()
        self.not_whole = None
        try:
            with outside_autocast(network.model), network.undone_on_error() as undo:
                before = self.measures()
                removed, refit = self._cut_within_limits(held_out_loss, undo)
                if removed:
                    self._check_that_it_runs()
                after = self.measures()
                stop_if_interrupted()
                self.network.agree("what is left after the event", after.params)  # if they disagree, all ranks undo it
                if preview:
                    undo()
        finally:
            network.rebuild_wrapper()
        if not removed:
            return None
        return PruneEvent.between(before, after, epoch, loss, "preview" if preview else "prune", removed, refit)

    def roll_back(self, snapshots: Iterable[Snapshot], epoch: int, loss: float | None) -> PruneEvent:
        """Restores snapshots, all or nothing, and returns the event."""
        before = self.measures()
        try:
            with outside_autocast(self.network.model), self.network.undone_on_error():
                self.network.restore(snapshots)
                after = self.measures()
                stop_if_interrupted()
        finally:
            self.network.rebuild_wrapper()
        return PruneEvent.between(before, after, epoch, loss, "roll-back", {})

    def _cut_within_limits(
        self, held_out_loss: HeldOutLoss | None, undo: Callable[[], None]
    ) -> tuple[dict[str, list[int]], Refit | None]:
        """Cuts, with ratios lowered until the target is just reached and the held-out loss does not rise too far.

        Returns:
            The removed units, and how the rest was refitted.
        """
        aims = self.budget.countable and not self.budget.reached()
        source = self.evidence.inverses
        if aims or held_out_loss is not None:
            source = cache(source)  # all trials start from the same network
        settings, most = self.settings, math.inf
        if held_out_loss is not None:
            before = self._loss(held_out_loss)
            settings, most = self._allocated(source, held_out_loss, before, undo), before + _MOST_INCREASE * abs(before)
        if "inputs" in settings.target and settings.cost_target and self.budget.reached():
            settings = self._inputs_alone(settings)
        by_curves = settings.criterion == "obs" and held_out_loss is None
        original = self._original(by_curves)
        tensors, enough = self.budget.aim()

        def attempt(share: float) -> dict[str, list[int]]:
            undo()
            smaller, inverses = settings.scaled(share), KnownInverses(source)
            if original is None or not by_curves:
                return self._cut(smaller, inverses)
            planned = original.plan(smaller, tensors, enough, settings.round_to or self._free_multiple)
            removed = cut_planned(self.network, planned, smaller, inverses)
            return removed | self._cut(self._inputs_alone(smaller), inverses) if self.prunes_inputs() else removed

        removed, share = attempt(1.0), 1.0
        if removed and aims and self.budget.reached():
            share = _boundary(lambda tried: bool(attempt(tried)) and self.budget.reached(), share)[1]
            removed = attempt(share)

        def does_harm() -> bool:
            return held_out_loss is not None and not self._loss(held_out_loss) <= most

        refit = self._refit(original, removed)
        if removed and does_harm():
            harmless, least = _boundary(lambda tried: bool(attempt(tried)) and does_harm(), share)
            # If even the smallest tried cut does harm, it is made all the same, as pruning could not go on otherwise.
            removed = (attempt(harmless) if harmless else {}) or attempt(least)
            refit = self._refit(original, removed)
        return removed, refit

    def _original(self, choosing: bool) -> Original | None:
        """Returns the network before the event, or None if events are made layer by layer or it cannot be used."""
        try:
            return self.evidence.original(choosing)
        except (ValueError, FloatingPointError) as error:  # the event layer by layer reports what is not finite
            self.not_whole = str(error)
            return None

    def _refit(self, original: Original | None, removed: Mapping[str, Sequence[int]]) -> Refit | None:
        """Refits the cut network as a whole if possible. Returns how it is refitted now."""
        if not self.settings.compensate:
            return None
        if original is not None and removed:
            try:
                original.refit(removed)
                return "whole"
            except ValueError as error:
                self.not_whole = str(error)
        return "layers"

    def _cut(self, settings: Settings, inverses: KnownInverses) -> dict[str, list[int]]:
        return cut_by_scores(self.network, settings, inverses, self._free_multiple)

    def _loss(self, held_out_loss: HeldOutLoss) -> float:
        """Returns the present held-out loss of the network. Leaves no gradients and no statistics behind."""
        network = self.network
        forget_compiled_code()
        with evaluating(network.model, *network.copies), interruptible():
            return network.mean(one_number("what held_out_loss gave", held_out_loss()))

    def _inputs_alone(self, settings: Settings) -> Settings:
        """Returns the settings of an event that removes input features only."""
        ratios = {group.name: settings.ratio_of(group) for group in self.network.graph if group.is_input}
        return settings.shared_out({name: ratio for name, ratio in ratios.items() if ratio})

    def _allocated(
        self, source: InverseOf, held_out_loss: HeldOutLoss, before: float, undo: Callable[[], None]
    ) -> Settings:
        """Returns the settings of an event, with ratios found by cutting each layer on trial."""
        network = self.network

        def trial(settings: Settings, name: str) -> list[tuple[int, float]]:
            inverses = KnownInverses(source, keep=True)
            results: list[tuple[int, float]] = []
            with contextlib.suppress(FloatingPointError):  # the trial of this layer ends there
                while len(results) < STEPS and self._cut(settings, inverses):
                    results.append((network.graph[name].size, self._loss(held_out_loss)))
            undo()
            return results

        return allocate(self.settings, network.graph.groups, self.budget.tensors(), before, trial)

    def _check_that_it_runs(self) -> None:
        """Raises if the cut network does not run any more, before anything is final."""
        try:
            run_once(self.network.model, self._example_inputs)
        except Exception as error:
            raise RuntimeError(
                f"the network does not run without the chosen channels ({type(error).__name__}: {error}). Nothing has "
                "changed; name the layer that needs its width in ignore="
            ) from error

    def close(self) -> None:
        """Removes the hooks from the model; no event can be made after that."""
        self._closed = True
        self.evidence.close()

    # --- what the network costs ---------------------------------------------------------------------------------------

    def measures(self) -> Measures:
        """Returns the present costs and sizes of the network."""
        costs = self.budget.costs()
        return Measures(costs["params"], costs["flops"], self.network.sizes())

    def target_reached(self) -> bool:
        """Whether a target is reached. Rank 0 decides, because every rank measures a different latency."""
        return self.network.first(self.reached())

    def reached(self) -> bool:
        """Whether a cost is as low and the inputs are as few as the target asks for."""
        settings = self.settings
        few = all(group.size <= settings.least_inputs(group) for group in self.network.graph if group.is_input)
        if "inputs" not in settings.target:
            return self.budget.reached()
        return few and (not settings.cost_target or self.budget.reached())

    def prunes_inputs(self) -> bool:
        """Whether features of the input may go."""
        return any(group.is_input and self.settings.ratio_of(group) for group in self.network.graph)


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
