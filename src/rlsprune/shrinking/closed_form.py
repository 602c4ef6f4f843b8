"""One cut of a trained network in closed form, without labels or training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from rlsprune.graph import Cuts, find_groups, open_attention_of, plan_cuts
from rlsprune.graph.sites import find_sites
from rlsprune.model.calls import ExampleInputs, bare_copy
from rlsprune.model.latency import latencies, ratio_quartiles
from rlsprune.model.layer_times import layer_times
from rlsprune.model.modes import evaluating
from rlsprune.model.progress import Progress
from rlsprune.model.selector import select_inputs
from rlsprune.model.tensors import complement
from rlsprune.prune.allocation import Costs
from rlsprune.prune.budget import Budget
from rlsprune.prune.choice import find_curves
from rlsprune.prune.refit import refit_layer
from rlsprune.prune.rounding import free_multiple
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts
from rlsprune.prune.widths import choose_widths
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.reconstruction.norms import make_consistent
from rlsprune.reconstruction.rebuild import rebuild
from rlsprune.shrinking.principal import product_moments, turn_heads
from rlsprune.statistics.inverse import Autocorrelation
from rlsprune.statistics.rows import has_rows, input_rows, weight_matrix

__all__ = ["RESOURCES", "ClosedForm", "CutPlan", "NothingToPruneError"]

RESOURCES = ("params", "flops", "latency")
"""The resources that a network can be shrunk in."""

_MARGIN = 1.03  # so that a target also holds when times are measured again
_MEASURED_STEPS = 6  # bisection steps towards a target that is measured, or counted only on the cut network


class NothingToPruneError(ValueError):
    """Raised if a network has nothing to prune."""


class CutPlan(NamedTuple):
    """The number of units that go from each group, with the estimated error and the target."""

    gone: Mapping[str, int]
    """Name of a group → number of its units that go."""
    error: float
    """The estimated error of the cut: the sum of the groups' errors."""
    resource: str = "flops"
    """The resource to save."""
    share: float = 0.0
    """The share of the resource to keep, as estimated from the weights."""
    missed: float | None = None
    """The share that the smallest network keeps, if that is more than the target; else None."""


class ClosedForm:
    """Cuts a network to any size and refits it to the outputs of the whole network.

    One pass over the whole network finds the order in which units go. Each cut starts from the whole network again.

    Args:
        model: The network. Its parameters stay the same objects.
        example_inputs: A single input.
        batches: Inputs to calibrate on.
        ignore: Names of layers that keep all their channels.
        min_channels: Least number of channels that every layer keeps.
        round_to: Layers keep a multiple of this many channels. None: 1, or for latency one measured to cost no time.
        turn: Whether heads of attention are turned into their principal axes before dimensions of them go.
        report: Function to report progress to.

    Raises:
        NothingToPruneError: Nothing can be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        batches: Calibration,
        *,
        ignore: Iterable[str] = (),
        min_channels: int = 1,
        round_to: int | None = None,
        turn: bool = True,
        report: Progress = lambda stage, done, total: None,
    ) -> None:
        self._model, self._example, self._batches, self._report = model, example_inputs, batches, report
        self._least, self._round_to, self._free = min_channels, round_to, 1
        report("finding channels", 0, None)
        self.graph = find_groups(model, example_inputs, ignore)
        """The groups of channels that may go."""
        if not self.graph.groups:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.graph.skipped.items())
            raise NothingToPruneError(f"the model has nothing to prune. {reasons}")
        batches.reduction.agree("the channels that can go", [(group.name, group.size) for group in self.graph])
        open_attention_of(self.graph)
        if any(group.attention is not None for group in self.graph):
            report("turning heads", 0, None)
        with evaluating(model):
            if turn:
                turn_heads(model, self.graph.groups, batches)
            products = product_moments(model, [group for group in self.graph if group.products], batches)
        self._whole = bare_copy(model).eval()
        self._budget = Budget(model, example_inputs, {})
        self._start = Snapshot(model, copy=True)
        # Groups of the whole network, because plans are made while the model may be cut.
        self.whole_groups = [group for group in self.graph if group.size > 1]
        tensors = {what: self._budget.tensors_of(what) for what in ("params", "flops")}
        self._costs = {what: Costs(own, self.whole_groups) for what, own in tensors.items()}
        """Resource → its costs; latency is added on demand."""
        with evaluating(self._whole):
            sites = find_sites(self._whole, batches.calls[0])
            batches.reduction.agree("the layers that the network calls", list(sites))
            self.sites = batches.reduction.by_first(lambda: sites)
            """The calls of the network's layers."""
            choice = find_curves(
                self._whole,
                self.graph,
                self.sites,
                batches,
                products,
                lambda name, done, total: report(f"choosing: {name}", done, total),
            )
        self.curves = choice.curves
        """Name of a group → the order in which its units go, and the costs."""
        self.shared = choice.shared
        """Name of a layer that is refitted to its own outputs → the autocorrelation of its inputs."""
        self.inconsistent: list[str] = []
        """Names of the batch norms that compute something else in training mode; known after `apply`."""

    @property
    def whole(self) -> nn.Module:
        """Returns a copy of the network as it was given."""
        return self._whole

    def plan(self, target: Mapping[str, float]) -> CutPlan:
        """Plans the cut with the least error that reaches one of the targets.

        If none can be reached, all units go that may. For latency none go, because even such a cut may hardly change
        it.

        Args:
            target: ``{"params": 0.3}``, ``{"flops": 0.5}`` or ``{"latency": 0.5}``: shares of the whole network; 0
                for the smallest network possible.
        """

        def least() -> CutPlan:
            plans = [self._plan_one(what, share) for what, share in target.items()]
            return min(plans, key=lambda plan: (plan.missed is not None, plan.error))

        return self._batches.reduction.by_first(least)

    def plan_share(self, what: str, share: float) -> CutPlan:
        """Plans the cut with the least error to a share of a resource, as estimated from the weights.

        It assumes that FLOPs and the time of a layer are proportional to its weights.
        """
        return self._batches.reduction.by_first(lambda: self._plan_share(what, share))

    def _plan_share(self, what: str, share: float) -> CutPlan:
        if what == "latency" and what not in self._costs:
            self._costs[what] = Costs(self._times(), self.whole_groups)
            self._free = free_multiple(self._whole, self._example, self.whole_groups)
        multiple = self._round_to or (self._free if what == "latency" else 1)
        costs = self._costs["params" if what == "flops" and not self._budget.proportional else what]
        goal = share * costs.without({})
        gone = choose_widths(self.curves, self.whole_groups, costs, goal, least=self._least, round_to=multiple)
        error = sum(self.curves[name].costs[count] for name, count in gone.items())
        left = costs.without({group.name: gone[group.name] / group.size for group in self.whole_groups})
        missed = left / costs.without({}) if left > goal * (1 + 1e-9) else None
        return CutPlan(gone, error, what, share, missed)

    def apply(self, plan: CutPlan) -> None:
        """Turns the model into the whole network, cut and refitted."""
        kept = self.cut(plan)
        self._report("refitting", 0, None)
        with evaluating(self._model):
            rebuild(
                self._whole,
                self._model,
                self.sites,
                kept,
                self._batches,
                on_layer=lambda name, done, total: self._report(f"refitting: {name}", done, total),
            )
        self._report("batch norms", 0, None)
        self.inconsistent = make_consistent(self._model, self._batches.calls, self._batches.reduction)

    def restore(self) -> None:
        """Restores the network as it was given."""
        self._start.restore()

    def costs(self) -> dict[str, int]:
        """Returns the present parameters and FLOPs of the network."""
        return self._budget.costs()

    # --- how much of each group ---------------------------------------------------------------------------------------

    def _plan_one(self, what: str, share: float) -> CutPlan:
        counted = what == "params" or (what == "flops" and self._budget.proportional)
        plan = self._plan_share(what, share)
        if counted or not share:
            return plan
        aim, enough = share, None
        low, high = 0.0, 1.0
        for _ in range(_MEASURED_STEPS):
            if self._measured(plan) <= share:
                low, enough = aim, plan._replace(missed=None)
            else:
                high = aim
            aim = (low + high) / 2
            plan = self._plan_share(what, aim)
        if enough is not None:
            return enough
        smallest = self._plan_share(what, 0.0)
        left = self._measured(smallest)
        if left <= share:
            return smallest._replace(missed=None)
        return smallest._replace(missed=left, gone={} if what == "latency" else smallest.gone)

    def _measured(self, plan: CutPlan) -> float:
        """Measures the cost of the network that the plan leaves, as a share of the whole network's cost."""
        self._report(f"measuring {plan.resource}", 0, None)
        self.cut(plan)
        share = self._relative(plan.resource)
        self.restore()
        return share

    def _times(self) -> dict[str, float]:
        """Measures the seconds of each layer, by the name of its weight; 0 for other parameters."""
        self._report("measuring layers", 0, None)
        names = {id(parameter): name for name, parameter in self._whole.named_parameters()}
        times = dict.fromkeys(names.values(), 0.0)
        for layer, seconds in layer_times(self._whole, self._example).items():
            times[names[id(self._whole.get_parameter(f"{layer}.weight" if layer else "weight"))]] += seconds
        return times

    def _relative(self, what: str) -> float:
        """Returns the present cost of the network, as a share of the whole network's cost.

        Times are measured in turns and scaled up a little, so that the target also holds when they are measured again.
        """
        if what != "latency":
            return self.costs()[what] / self._budget.original[what]
        own, whole = latencies([(self._model, self._example), (self._whole, self._example)])
        return _MARGIN * ratio_quartiles(own, whole)[1]

    # --- the cut ------------------------------------------------------------------------------------------------------

    def cut(self, plan: CutPlan) -> dict[str, Tensor]:
        """Turns the model into the whole network, cut but not refitted.

        Returns:
            Name of a layer that lost outputs → the outputs that it keeps.
        """
        self.restore()
        chosen = [
            (self.graph[name], sorted(self.curves[name].order[:count])) for name, count in plan.gone.items() if count
        ]
        cuts = plan_cuts(chosen)
        self._refit_shared(cuts)
        for group, units in chosen:
            for member in group.consumers if group.is_input else ():
                assert isinstance(member.module, nn.Linear)
                select_inputs(member.module, complement(member.module.in_features, member.index[units].flatten()))
        apply_cuts(self._model, cuts)
        return cuts.outputs

    def _refit_shared(self, cuts: Cuts) -> None:
        """Refits layers that are called several times to their own outputs, on the inputs of all calls."""
        for name, autocorrelation in self.shared.items():
            stay, layer = cuts.stay.get((name, "in")), self._model.get_submodule(name)
            if stay is None or not has_rows(layer):
                continue
            gone = input_rows(layer, (~stay).nonzero()).flatten(1)
            size = weight_matrix(layer).shape[1]  # leaves out the shift that a batch norm could make
            pairs = zip(autocorrelation[:, :size, :size], gone, strict=True)
            refit_layer(layer, [Autocorrelation(A).without(rows) for A, rows in pairs])
