"""Who watches a run: the terminal, a log, a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rlsprune.train.method import Retained

__all__ = ["Observer"]


class Observer:
    """Is told what happens in a run and by itself does nothing. Override what is of interest."""

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """The run starts after `done` of its `epochs`, each of so many batches."""

    def batch(self, number: int, loss: Tensor) -> None:
        """That many batches of the epoch are done."""

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """An epoch is done: its line in the metrics, and what is left of every layer."""

    def event(self, event: Mapping[str, Any]) -> None:
        """The network was pruned: its line in the events."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""

    def close(self) -> None:
        """Nothing more will come: the run is done, was interrupted or failed."""
