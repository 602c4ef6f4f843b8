"""Shrinks a trained network: at once in closed form, by a search, or in rounds with training between."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from rlsprune.distributed.ddp import rebuild_around
from rlsprune.distributed.fingerprint import fingerprint
from rlsprune.distributed.ranks import Ranks, find_ranks
from rlsprune.graph.build import module_names
from rlsprune.model.arguments import check_argument, check_callable, is_count, one_number
from rlsprune.model.calls import ExampleInputs, bare_copy, unwrap
from rlsprune.model.demands import check_network
from rlsprune.model.modes import outside_autocast, refuse_inference_mode, run_once
from rlsprune.model.progress import Progress, shown_progress
from rlsprune.model.tensors import forget_compiled_code, is_sharded
from rlsprune.optim.rls import RLS
from rlsprune.reconstruction.calibration import Calibration, Reduction
from rlsprune.shrinking.closed_form import RESOURCES, ClosedForm, CutPlan, NothingToPruneError
from rlsprune.shrinking.front import Front, FrontPoint, Score, Shrunk
from rlsprune.shrinking.recovery import Recovery
from rlsprune.training.batches import GivenBatches, Pair
from rlsprune.training.loop import Loss
from rlsprune.training.objective import Objective

__all__ = ["shrink"]

_ROUND = 0.3  # share of the remaining cost that goes in a round of a search with training
_SEARCH_STEPS = 6  # sizes tried in a search with max_drop, after the smallest


def shrink(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: Mapping[str, float] | str | None = None,
    max_drop: float | None = None,
    valid: Iterable[Any] | None = None,
    loss: Loss | None = None,
    score: Score | None = None,
    recovery_epochs: int = 0,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    ratio: float | None = None,
    ignore: Iterable[str] = (),
    min_channels: int = 1,
    round_to: int | None = None,
    calibration: int = 2048,
    on_point: Callable[[FrontPoint, nn.Module], object] | None = None,
    on_progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Shrunk:
    """Makes a trained network as small as the target or the allowed drop permits.

    Without recovery epochs it works at once and in closed form, from inputs alone: it removes the channels that change
    the layers' outputs least, and refits every layer, in order, to the given network's outputs. With recovery
    epochs it then trains, at a rate that falls to zero, until the score is back or the epochs are used up. It cuts
    once, down to the target; with ``max_drop`` or ``ratio`` it cuts in rounds, and trains after each.

    Args:
        model: A network trained by anyone, with any optimizer. It is changed in place.
        batches: A list or a ``DataLoader``, which is iterated several times. Each batch is a tensor of inputs, a pair
            ``(inputs, targets)``, or a dict of keyword arguments whose ``labels``, if there are any, are the targets.
            Inputs may be a tensor, a tuple of arguments or a dict of them; several inputs without targets come as a
            dict or as ``((one, other), None)``. Let a ``DataLoader`` shuffle: its first ``calibration`` inputs count.
        target: The fraction of the given network to end at: ``{"params": 0.1}``, ``{"flops": 0.25}`` or
            ``{"latency": 0.5}``. With ``max_drop``, it may be only the name of the resource to shrink: ``"params"``,
            ``"flops"`` (the same as None) or ``"latency"``.
        max_drop: Largest allowed drop of the score, in its own unit; the result is the smallest network within it. With
            fractions as target, it is never smaller than these.
        valid: Batches to measure the score on; None for those that the layers are refitted on.
        loss: The loss of recovery, from outputs and targets. None: without targets, the distance of the outputs
            from the given network's (Kullback-Leibler divergence of class scores, else the squared difference over the
            variance); with class labels, four fifths of that and a fifth of the cross-entropy; with other targets, the
            mean squared error; and the network's own ``loss`` if it returns a different one for a dict's ``labels``, as
            causal language models do.
        score: A function from a network to a number, higher is better; it must not change the network. None: accuracy
            in percent for class labels; without targets, the percentage of inputs whose class is the given network's,
            if its outputs look like class scores; else, or if the network has its own loss, minus the loss.
        recovery_epochs: Largest number of epochs of training after each cut; 0 for no training.
        optimizer: A function from the network to the optimizer of a round; None for ``RLS(model, lr=0.1)``.
        ratio: Share of the remaining cost that a round with recovery removes. None: everything down to the target at
            once, or 0.3 with ``max_drop``.
        ignore: Names of layers that keep all their channels.
        min_channels: Least number of channels that every layer keeps.
        round_to: Layers keep a multiple of this many channels. None: 1, or with a target of latency the multiple that
            is measured to cost no time.
        calibration: Number of inputs that choose the channels and refit the layers.
        on_point: Called with each point and the network at that point.
        on_progress: Called with the current stage, as in ``("refitting: layer1.0.conv1", 3, 21)`` or
            ``("round 2, recovery epoch 1 of 2", 57, 469)``. None: a line on the terminal, if there is one.
        process_group: The processes that shrink the network together: all of them call this, each with its own share of
            ``batches`` and ``valid``, and all get the same network. None: the group of the model's wrapper, else
            the default group, if there is one.

    Returns:
        The network and the front. With ``max_drop`` it is the smallest network within the drop, else the last.

    Raises:
        ValueError: Neither target nor max_drop is given, there is no batch, batches is an iterator that ends after one
            use, or the score cannot distinguish the network from one with constant outputs.
        FloatingPointError: Recovery diverged. The network is then the last good one.

    Examples:
        >>> import torch, rlsprune
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> small = rlsprune.shrink(model, torch.rand(8, 32, 8), target={"params": 0.5})
        >>> small.chosen.params <= 0.5 * small.front[0].params
        True
    """
    refuse_inference_mode("shrink")
    check_argument("max_drop", max_drop, lambda drop: drop is None or drop >= 0, "None or at least 0")
    check_argument("recovery_epochs", recovery_epochs, is_count(recovery_epochs, 0), "a whole number, at least 0")
    check_argument("ratio", ratio, lambda share: share is None or 0 < share < 1, "None, or above 0 and below 1")
    for name, count in {"calibration": calibration, "min_channels": min_channels}.items():
        check_argument(name, count, is_count(count), "a whole number, at least 1")
    rounding = round_to is None or is_count(round_to)
    check_argument("round_to", round_to, rounding, "None or a whole number, at least 1")
    functions = {"loss": loss, "score": score, "optimizer": optimizer, "on_point": on_point, "on_progress": on_progress}
    for name, function in functions.items():
        check_callable(name, function)
    goal = _goal(target, max_drop)
    if max_drop is not None and valid is None and score is None:
        warnings.warn("max_drop is measured on the batches that layers are refitted on: give valid=", stacklevel=2)
    check_network(model)
    ranks, reduction = _find_ranks(model, process_group)
    given_model, model = model, unwrap(model)
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError("the model has no parameters: there is nothing to prune")
    device = first.device
    given = GivenBatches(batches, device, "batches", ranks)
    _check_single(model, given.example)
    sample = given.sample(calibration)
    scored: Iterable[Pair] = sample.pairs if valid is None else GivenBatches(valid, device, "valid", ranks)
    whole = bare_copy(model).eval()
    objective = Objective(whole, sample.pairs[0], loss, given.named, ranks)
    was_training = model.training
    with contextlib.ExitStack() as stack:
        silent = on_progress is None and reduction.rank > 0
        tell = stack.enter_context(shown_progress((lambda stage, done, total: None) if silent else on_progress))

        def measure(network: nn.Module) -> float:
            tell("scoring", 0, None)
            if score is None:
                return objective.score(network, scored)
            return reduction.mean(one_number("the score", score(network)))

        cutter = _Cutter(
            model, given.example, Calibration.of(sample, ranks), module_names(ignore), min_channels, round_to, tell
        )
        stack.callback(rebuild_around, given_model)
        stack.enter_context(outside_autocast(model))
        front = Front(model, given.example, measure, max_drop, on_point, None if score else objective.own_score)
        stack.callback(forget_compiled_code)
        stack.callback(model.train, was_training)
        stack.callback(front.restore)
        if max_drop is not None:
            front.check()
        if recovery_epochs:
            make = optimizer or (lambda network: RLS(network, lr=0.1, process_group=process_group))
            recovery = Recovery(model, given, objective, make, recovery_epochs, tell, ranks)
            _in_rounds(front, cutter, recovery, goal, ratio or (1.0 if max_drop is None else _ROUND))
        else:
            _at_once(front, cutter, goal, max_drop)
    return Shrunk(model, front.chosen, tuple(front.points))


def _find_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> tuple[Ranks | None, Reduction]:
    """Finds the processes that shrink together, and checks that they have the same network.

    Raises:
        DisagreementError: The processes have different networks.
        ValueError: The network is divided over the processes.
    """
    divided = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if divided is not None:
        raise ValueError(
            f"{divided!r} is divided over the ranks, and shrink needs the whole network on each: call it before "
            "fully_shard, or on another network that load_checkpoint has filled. rlsprune.Pruner takes divided networks"
        )
    ranks = find_ranks(model, group)
    reduction = Reduction(ranks)
    if ranks is not None:
        ranks.agree("the network", fingerprint(unwrap(model), None))
    return ranks, reduction


def _check_single(model: nn.Module, example: ExampleInputs) -> None:
    """Raises if the network cannot be called with one input."""
    try:
        run_once(model, example)
    except Exception as error:
        norms = [
            name
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is None
        ]
        remedy = f"; batch norm {norms[0]!r} keeps no running statistics: make it with them" if norms else ""
        raise ValueError(
            f"the network cannot be called with a single input of batches ({type(error).__name__}: {error}){remedy}"
        ) from error


def _goal(target: Mapping[str, float] | str | None, max_drop: float | None) -> dict[str, float]:
    """Returns for each resource to shrink the share to end at; 0 for the smallest possible."""
    known = f"fractions of {', '.join(RESOURCES)}; with max_drop, also one of these names alone"
    if max_drop is None and (target is None or isinstance(target, str)):
        raise ValueError(
            "give target, max_drop, or both: without them there is no end to pruning, and a target that is only a name "
            "says what to make small, not how small"
        )
    if target is None or isinstance(target, str):
        check_argument("target", target, target is None or target in RESOURCES, known)
        return {target or "flops": 0.0}
    shares = isinstance(target, Mapping) and len(target) > 0
    fractions = shares and all(isinstance(share, Real) and 0 < share < 1 for share in target.values())
    check_argument("target", target, fractions, known)
    check_argument("target", target, all(what in RESOURCES for what in target), known)
    return dict(target)


class _Cutter:
    """Makes closed forms of the network as it is."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleInputs,
        batches: Calibration,
        ignore: tuple[str, ...],
        min_channels: int,
        round_to: int | None,
        tell: Progress,
    ) -> None:
        self._model, self._example, self._batches, self._tell = model, example, batches, tell
        self._ignore, self._min_channels, self._round_to = ignore, min_channels, round_to

    def look(self, stage: str = "") -> ClosedForm:
        """Returns the closed form of the present network."""

        def report(what: str, done: int, total: int | None) -> None:
            self._tell(f"{stage}{what}", done, total)

        return ClosedForm(
            self._model,
            self._example,
            self._batches,
            ignore=self._ignore,
            min_channels=self._min_channels,
            round_to=self._round_to,
            report=report,
        )


def _at_once(front: Front, cutter: _Cutter, goal: Mapping[str, float], max_drop: float | None) -> None:
    """Shrinks in closed form: by one cut, or by a bisection for the smallest network within the drop."""
    form = cutter.look()

    def attempt(plan: CutPlan) -> bool:
        form.apply(plan)
        front.pruned()
        front.add()
        return front.points[-1].within

    smallest = form.plan(goal)
    _tell_missed(smallest, goal, 1.0)
    reached = bool(smallest.gone) and attempt(smallest)
    _tell_inconsistent(form)
    if reached or max_drop is None:
        return
    low, high = smallest.share, 1.0
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        if attempt(form.plan_share(smallest.resource, middle)):
            high = middle
        else:
            low = middle


def _tell_missed(plan: CutPlan, goal: Mapping[str, float], kept: float) -> None:
    """Warns of a target that no cut reaches; ``kept`` is the share of the given network that the plan started from."""
    if plan.missed is None or not goal[plan.resource]:
        return
    spared = "" if plan.gone else ", and nothing was cut for that"
    warnings.warn(
        f"target={dict(goal)} is out of reach: {kept * plan.missed:.3g} of the {plan.resource} is left when everything "
        f"that may go is gone{spared}. Check ignore, min_channels and round_to, and rlsprune.Pruner(…).skipped of this "
        "network",
        stacklevel=4,
    )


def _tell_inconsistent(form: ClosedForm) -> None:
    """Warns of batch norms through which training would change the network's outputs."""
    if form.inconsistent:
        named = ", ".join(map(repr, form.inconsistent))
        warnings.warn(
            "batch norms have no scale and shift of their own, or are called several times: "
            f"{named}. They were left alone, so training mode and evaluation mode compute different outputs. Before "
            "you train the network, set these modules to eval()",
            stacklevel=4,
        )


def _in_rounds(front: Front, cutter: _Cutter, recovery: Recovery, goal: Mapping[str, float], ratio: float) -> None:
    """Shrinks in rounds: cuts, trains and scores, until the target is reached or the score has dropped too far."""
    kept = dict.fromkeys(goal, 1.0)  # shares of the given network that the cuts so far have aimed at
    while front.points[-1].within:
        name = f"round {len(front.points)}"
        try:
            form = cutter.look(f"{name}, ")
        except NothingToPruneError:
            if len(front.points) == 1:
                raise
            break
        step = {what: max(1 - ratio, goal[what] / share) for what, share in kept.items()}
        plan = form.plan(step)
        _tell_missed(plan, goal, kept[plan.resource])
        if not any(plan.gone.values()):
            break
        form.apply(plan)
        _tell_inconsistent(form)
        kept = {what: share * step[what] for what, share in kept.items()}
        front.pruned()
        recovery.run(name, front)
        front.add()
        if plan.missed is not None or any(share <= goal[what] * (1 + 1e-9) for what, share in kept.items()):
            break
