"""Who watches a run: the terminal, a log, a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlsprune.app.run.method import Retained

__all__ = ["Observer", "Observers"]


class Observer:
    """Is told what happens in a run and by itself does nothing. Override what is of interest."""

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """The run starts after `done` of its `epochs`, each of so many batches."""

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """What is trained, right after the start.

        Args:
            model: The live network: it shrinks while the run goes.
            layers: What is left of its layers now, as in an epoch's line.
            metrics: The lines of the epochs that were done before.
        """

    def batch(self, number: int, loss: Tensor) -> None:
        """Is told how many batches of the epoch are done."""

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """An epoch is done: its line in the metrics, and what is left of every layer."""

    def event(self, event: Mapping[str, Any]) -> None:
        """The network was pruned: its line in the events."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""

    def close(self) -> None:
        """Nothing more will come: the run is done, was interrupted or failed."""


class Observers(Observer):
    """Several observers as one.

    Args:
        observers: Each is told everything, in this order.
    """

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.start(config, done, epochs, batches)

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.network(model, layers, metrics)

    def batch(self, number: int, loss: Tensor) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.batch(number, loss)

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.epoch(metrics, counts)

    def event(self, event: Mapping[str, Any]) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.event(event)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tells them all."""
        for observer in self.observers:
            observer.end(summary)

    def close(self) -> None:
        """Tells them all, whatever one of them does."""
        with ExitStack() as stack:
            for observer in reversed(self.observers):
                stack.callback(observer.close)
