"""The sizes that a network was cut to, its score at each, and the best of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rlsprune.model.calls import ExampleInputs
from rlsprune.model.counts import count
from rlsprune.prune.snapshot import Snapshot

__all__ = ["Front", "FrontPoint", "Score", "Shrunk"]

Score = Callable[[nn.Module], float]
"""A function that returns a network's score, higher is better. It must leave the network as it is."""


@dataclass(frozen=True)
class FrontPoint:
    """The size, cost and score of a network between the given one and the smallest.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> small = rlsprune.shrink(model, torch.rand(8, 32, 8), target={"params": 0.5})
        >>> given, smaller = small.front
        >>> given.params, smaller.params <= 353, smaller.flops < given.flops, smaller.epochs
        (706, True, True, 0)
    """

    params: int
    flops: int
    """FLOPs for one input."""
    score: float
    """The score after recovery."""
    score_pruned: float
    """The score right after the cut, before any training."""
    epochs: int
    """Epochs of recovery since the beginning."""
    seconds: float
    """Time since the beginning, without scoring and calls of `on_point`."""
    within: bool
    """Whether its score is within the allowed drop."""


@dataclass(frozen=True, eq=False)
class Shrunk:
    """The result of `shrink`. ``print`` shows every size that was tried.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> small = rlsprune.shrink(model, torch.rand(8, 32, 8), target={"params": 0.5})
        >>> small.model is model, small.chosen is small.front[-1]
        (True, True)
    """

    model: nn.Module
    """The given network, now smaller."""
    chosen: FrontPoint
    """The point of the front that the network is at."""
    front: tuple[FrontPoint, ...]
    """The given network first, then the sizes in the order in which they were tried."""

    def __str__(self) -> str:
        first = self.front[0]
        lines = [f"{'params':>12} {'%':>6} {'FLOPs %':>8} {'score':>8} {'right after':>12} {'epochs':>7}"]
        for point in self.front:
            mark = "  ← this one" if point is self.chosen else ""
            lines.append(
                f"{point.params:>12,} {100 * point.params / first.params:>6.1f} "
                f"{100 * point.flops / max(first.flops, 1):>8.1f} {point.score:>8.2f} {point.score_pruned:>12.2f} "
                f"{point.epochs:>7}{mark}"
            )
        return "\n".join(lines)


class Front:
    """The points so far, and the best network among them."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleInputs,
        score: Score,
        max_drop: float | None,
        on_point: Callable[[FrontPoint, nn.Module], object] | None,
        own_score: float | None,
    ) -> None:
        self._model, self._example = model, example
        self._score_of, self._max_drop, self._on_point = score, max_drop, on_point
        self._started, self.epochs = time.perf_counter(), 0
        self.points: list[FrontPoint] = []
        self._score = self._score_pruned = self._scored() if own_score is None else own_score
        if self._score != self._score:
            raise ValueError("the score of the given network is not a number: check score, loss and targets")
        self.add()

    def check(self) -> None:
        """Checks that the score distinguishes the network from one whose weights are all zero.

        Raises:
            ValueError: The two scores are equal.
        """
        before = Snapshot(self._model, copy=True)
        try:
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.zero_()
            silent = self._scored()
        finally:
            before.restore()
        if silent == self.points[0].score:
            raise ValueError(
                f"the score is {silent:g} for the given network and for one whose weights are all zero: it cannot tell "
                "networks apart, so max_drop has no meaning. Check score and valid"
            )

    def pruned(self) -> None:
        """Scores the network right after a cut."""
        self._score = self._score_pruned = self._scored()

    def trained(self) -> None:
        """Scores the network after an epoch of recovery, and counts the epoch."""
        self.epochs += 1
        self._score = self._scored()

    def add(self) -> None:
        """Adds the present network as a point of the front."""
        params, flops = count(self._model, self._example)
        seconds = time.perf_counter() - self._started
        first = self.points[0].score if self.points else self._score
        within = self._max_drop is None or self._score >= first - self._max_drop
        point = FrontPoint(params, flops, self._score, self._score_pruned, self.epochs, seconds, within)
        self.points.append(point)
        if within:  # then it is smaller than all earlier ones that were
            self.chosen = point
            self._best = Snapshot(self._model, copy=True)
        if self._on_point is not None:
            with self._untimed():
                self._on_point(point, self._model)

    def restore(self) -> None:
        """Restores the smallest network whose score was within the allowed drop."""
        self._best.restore()

    @property
    def recovered(self) -> bool:
        """Whether the score is at least that of the given network."""
        return self._score >= self.points[0].score

    def _scored(self) -> float:
        with self._untimed():
            return float(self._score_of(self._model))

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes what happens inside from the counted time."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before
