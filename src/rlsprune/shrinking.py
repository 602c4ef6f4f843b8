"""A network that someone else has trained, made smaller: prune, recover, look, again."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlsprune.model.arguments import check_argument
from rlsprune.model.cost import count
from rlsprune.model.modes import evaluating
from rlsprune.optim.rls import RLS
from rlsprune.prune.pruner import Pruner
from rlsprune.prune.snapshot import Snapshot
from rlsprune.training.batches import OnDevice
from rlsprune.training.guard import Guard
from rlsprune.training.loop import Batch, Loss, evaluate, train_epoch

__all__ = ["FrontPoint", "Shrunk", "shrink"]

# Batches that an event's statistics come from: enough for the most rows that are kept of a layer.
_CALIBRATION_BATCHES = 32
_WEIGHED = 512  # held-out inputs that tell what cutting a layer costs

Score = Callable[[nn.Module], float]
"""How good a network is, higher is better."""

Progress = Callable[[str, int, int | None], object]
"""Is told what is being done, how much of it is done, and of how much: None where nobody knows."""


@dataclass(frozen=True)
class FrontPoint:
    """A network on the way from the given one to the smallest."""

    params: int
    flops: int
    """Of one input."""
    score: float
    """After recovery."""
    score_pruned: float
    """Right after the event, before any training."""
    epochs: int
    """Of recovery, since the beginning."""
    seconds: float
    """Since the beginning, without the time it took to score and to tell `on_point`."""
    within: bool
    """Whether its score is within the allowed drop."""


@dataclass(frozen=True, eq=False)
class Shrunk:
    """What `shrink` gives back."""

    model: nn.Module
    """The network that was given, smaller."""
    chosen: FrontPoint
    """Which point of the front it is."""
    front: tuple[FrontPoint, ...]
    """The given network first, then one point for each event, smaller and smaller."""

    def __str__(self) -> str:
        first = self.front[0]
        lines = [f"{'params':>12} {'%':>6} {'FLOPs %':>8} {'score':>8} {'right after':>12} {'epochs':>7}"]
        for point in self.front:
            mark = "  ← this one" if point is self.chosen else ""
            lines.append(
                f"{point.params:>12,} {100 * point.params / first.params:>6.1f} "
                f"{100 * point.flops / first.flops:>8.1f} {point.score:>8.2f} {point.score_pruned:>12.2f} "
                f"{point.epochs:>7}{mark}"
            )
        return "\n".join(lines)


def shrink(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    target: Mapping[str, float] | None = None,
    max_drop: float | None = None,
    valid: Iterable[Batch] | None = None,
    loss: Loss = F.cross_entropy,
    score: Score | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    ratio: float = 0.2,
    recovery_epochs: int = 2,
    criterion: str = "obs",
    ignore: Iterable[str] = (),
    round_to: int = 1,
    allocate: bool = True,
    on_point: Callable[[FrontPoint, nn.Module], object] | None = None,
    on_progress: Progress | None = None,
) -> Shrunk:
    """Makes a trained network as small as the target or the allowed drop lets it be.

    Each round removes a share of the channels, from the layers where that costs the held-out loss least, refits the
    layers that read them from the exact statistics of their inputs, and trains at a rate that falls to zero, until the
    score is back or the epochs of recovery are used up.

    Args:
        model: Trained by anyone, with any optimizer. It is changed in place.
        data: Training batches of (inputs, labels), to be gone through many times, as a ``DataLoader`` is.
        target: End at this fraction of the given network: ``{"params": 0.1}``, ``{"flops": 0.25}`` or
            ``{"latency": 0.5}``.
        max_drop: End when the score stays more than this below the given network's, in the score's own unit, and go
            back to the smallest network that was within it.
        valid: Batches that the score is measured on; None for the training batches, which flatters.
        loss: From outputs and labels.
        score: None for the percentage of inputs whose class is found.
        optimizer: Makes the one that recovers; None for ``RLS(model, lr=0.1)``.
        ratio: The share of a layer's channels that goes in a round; with ``allocate`` of all of them, more or less.
        recovery_epochs: At most, after each round.
        criterion: As of `rlsprune.Pruner`.
        ignore: Names of layers that keep all their channels.
        round_to: Layers keep a multiple of this many channels.
        allocate: Whether a round takes more from the layers where it costs the loss less, on a sample of the batches
            that are scored, and as much in all; if not, it takes ``ratio`` of every layer.
        on_point: Called with each point and the network as it is there.
        on_progress: Called with what is being done, as in ``("round 2, recovery epoch 1 of 2", 57, 469)`` after 57 of
            469 batches, or ``("round 2, pruning", 0, None)``: for a progress bar.

    Returns:
        The network and the front. With ``max_drop`` it is the smallest within it, else the last.

    Raises:
        ValueError: Neither target nor max_drop is given, or there is no batch, or an iterator that ends after one use.
        FloatingPointError: Recovery diverged. The network is then the last good one.

    Examples:
        >>> import torch, rlsprune
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> inputs = torch.rand(256, 8)
        >>> batches = [(inputs[i : i + 32], (inputs[i : i + 32, 0] > 0.5).long()) for i in range(0, 256, 32)]
        >>> small = rlsprune.shrink(model, batches, target={"params": 0.3}, valid=batches)
        >>> small.chosen.params <= 0.3 * small.front[0].params
        True
    """
    if target is None and max_drop is None:
        raise ValueError("give target, max_drop, or both: without either there is no end to pruning")
    check_argument("max_drop", max_drop, max_drop is None or max_drop >= 0, "None or at least 0")
    check_argument("recovery_epochs", recovery_epochs, recovery_epochs >= 0, "at least 0")
    for name, given in (("data", data), ("valid", valid)):
        if isinstance(given, Iterator):
            raise ValueError(
                f"{name} can be gone through only once: give a list of batches or a DataLoader, not its iterator"
            )
    if valid is None and (score is None or allocate):
        warnings.warn("shrink measures on the training batches: give valid= held-out ones", stacklevel=2)
    device = next(model.parameters()).device
    batches = OnDevice(data, device, "data")
    scored = batches if valid is None else OnDevice(valid, device, "valid")
    tell: Progress = on_progress or (lambda stage, done, total: None)
    measure = score or (lambda network: evaluate(network, scored, loss).accuracy)

    def told_score(network: nn.Module) -> float:
        tell("scoring", 0, None)
        return measure(network)

    example = batches.example
    held_out_loss = _held_out_loss(model, scored.sample(_WEIGHED), loss) if allocate else None
    was_training = model.training
    recovery = RLS(model, lr=0.1) if optimizer is None else optimizer(model)
    with contextlib.ExitStack() as stack:
        if isinstance(recovery, RLS):
            stack.callback(recovery.close)
        pruner = Pruner(
            model,
            recovery,
            example,
            ratio=ratio,
            criterion=criterion,
            ignore=ignore,
            round_to=round_to,
            target=target,
            held_out_loss=held_out_loss,
        )
        stack.callback(pruner.close)
        stack.callback(model.train, was_training)
        guard, epoch_batches = Guard(model), len(batches)
        steps = max(1, recovery_epochs * epoch_batches)
        front = _Front(model, recovery, example, told_score, max_drop, on_point)
        stack.callback(front.restore)

        def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
            return loss(model(inputs), labels)

        def recover(name: str) -> None:
            rate = LambdaLR(recovery, lambda step: max(0.0, 1 - step / steps))
            for epoch in range(1, recovery_epochs + 1):
                stage = f"{name}, recovery epoch {epoch} of {recovery_epochs}"

                def on_batch(number: int, loss: Tensor, stage: str = stage) -> None:
                    rate.step()
                    tell(stage, number, epoch_batches)

                guard.start_epoch(front.epochs + 1, after_prune=epoch == 1)
                trained = train_epoch(model, recovery, batches, loss_of, guard=guard, on_batch=on_batch)
                guard.epoch_loss("training", trained.mean)
                front.trained()
                if front.recovered:
                    return

        while front.points[-1].within and not pruner.target_reached:
            name = f"round {len(front.points)}"
            tell(f"{name}, pruning", 0, None)
            pruner.calibrate(itertools.islice(batches, _CALIBRATION_BATCHES))
            if pruner.prune() is None:
                break
            front.pruned()
            recover(name)
            front.add()
    return Shrunk(model, front.chosen, tuple(front.points))


def _held_out_loss(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> Callable[[], float]:
    """The mean loss of the network as it is; it is called in evaluation mode."""

    def mean() -> float:
        total = sum(float(loss(model(inputs), labels)) * len(labels) for inputs, labels in batches)
        return total / sum(len(labels) for _, labels in batches)

    with evaluating(model):
        first = mean()
    if not math.isfinite(first):
        raise ValueError(
            f"the loss of the given network is {first} on a sample of the batches that are scored, so it cannot tell "
            "which layers to cut: check loss and labels, or give allocate=False"
        )
    return mean


class _Front:
    """The points so far, and the best network among them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example: Tensor,
        score: Score,
        max_drop: float | None,
        on_point: Callable[[FrontPoint, nn.Module], object] | None,
    ) -> None:
        self._model, self._optimizer, self._example = model, optimizer, example
        self._score_of, self._max_drop, self._on_point = score, max_drop, on_point
        self._started, self.epochs = time.perf_counter(), 0
        self.points: list[FrontPoint] = []
        self.pruned()
        self.add()

    def pruned(self) -> None:
        """An event has just happened."""
        self._score = self._score_pruned = self._scored()

    def trained(self) -> None:
        """So has an epoch of recovery."""
        self.epochs += 1
        self._score = self._scored()

    def add(self) -> None:
        """The network as it is now is a point of the front."""
        params, flops = count(self._model, self._example)
        seconds = time.perf_counter() - self._started
        first = self.points[0].score if self.points else self._score
        within = self._max_drop is None or self._score >= first - self._max_drop
        self.points.append(FrontPoint(params, flops, self._score, self._score_pruned, self.epochs, seconds, within))
        if within:
            self.chosen = self.points[-1]
            self._best = Snapshot(self._model, self._optimizer, copy=True)
        if self._on_point is not None:
            with self._untimed():
                self._on_point(self.points[-1], self._model)

    def restore(self) -> None:
        """Whatever happened: the smallest network that was good enough."""
        self._best.restore()

    @property
    def recovered(self) -> bool:
        """Whether the score is back where it was at the beginning."""
        return self._score >= self.points[0].score

    def _scored(self) -> float:
        with self._untimed():
            return float(self._score_of(self._model))

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """What happens inside is taken out of the time that counts."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before
