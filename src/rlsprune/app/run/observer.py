"""Observers of a run, such as the terminal, a log or a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlsprune.app.run.method import Retained

__all__ = ["Observer", "Observers"]


class Observer:
    """An observer whose methods a run calls. They do nothing by default; override those of interest."""

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Learns that the run starts after `done` of its `epochs`, each of so many batches."""

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Gets the network, right after the start.

        Args:
            model: The live network, which shrinks during the run.
            layers: The present sizes of its layers, as in an epoch's line.
            metrics: The lines of the epochs that were done before.
        """

    def batch(self, number: int, loss: Tensor) -> None:
        """Gets the number of batches of the epoch that are done, and the last batch's loss."""

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Gets a finished epoch's line of the metrics and the counts of every layer."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Gets the line of an event after the network was pruned."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Gets the summary of the finished run."""

    def close(self) -> None:
        """Learns that nothing more will come, because the run is done, was interrupted or failed."""


class Observers(Observer):
    """Several observers as one.

    Args:
        observers: The observers, which are called in this order.
    """

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.start(config, done, epochs, batches)

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.network(model, layers, metrics)

    def batch(self, number: int, loss: Tensor) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.batch(number, loss)

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.epoch(metrics, counts)

    def event(self, event: Mapping[str, Any]) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.event(event)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Passes the call to all observers."""
        for observer in self.observers:
            observer.end(summary)

    def close(self) -> None:
        """Closes all observers, even if one of them raises."""
        with ExitStack() as stack:
            for observer in reversed(self.observers):
                stack.callback(observer.close)
