"""What a run shows while it goes: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rlsprune.train.observer import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from rlsprune.train.method import Retained

__all__ = ["BarObserver", "LineObserver", "describe", "observer"]


def observer(quiet: bool) -> Observer:
    """What suits the place where standard output goes."""
    if quiet:
        return Observer()
    return BarObserver() if sys.stdout.isatty() else LineObserver()


def describe(summary: Mapping[str, Any]) -> str:
    """A finished run in one line."""
    return (
        f"{summary['method']} on {summary['experiment']}, seed {summary['seed']}: precision "
        f"{summary['precision']:.2f} %, {summary['weights_percent']:.1f} % of the weights, "
        f"{summary['nodes_percent']:.1f} % of the nodes, {summary['flops_percent']:.1f} % of the FLOPs, "
        f"{summary['seconds']:.0f} s"
    )


class LineObserver(Observer):
    """A line per epoch and per event."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._epochs = 0

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Says what is run."""
        self._epochs = epochs
        resumed = f", resumed after epoch {done}" if done else ""
        self.console.print(
            f"{config['method']} on {config['experiment']}, seed {config['seed']}, {epochs} epochs{resumed}"
        )

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """The epoch's figures."""
        shape = "-".join(str(count.nodes) for count in counts.values())
        self.console.print(
            f"epoch {metrics['epoch']:>{len(str(self._epochs))}}/{self._epochs}  loss {metrics['train_loss']:.4f}  "
            f"precision {metrics['precision']:.2f} %  weights {metrics['weights_percent']:.1f} %  nodes {shape}  "
            f"{metrics['seconds']:.1f} s"
        )

    def event(self, event: Mapping[str, Any]) -> None:
        """What was pruned."""
        changes = [
            f"{layer['name']} {layer['before']}→{layer['after']}"
            for layer in event["layers"]
            if layer["before"] != layer["after"]
        ]
        what = "rolled back" if event["kind"] == "roll-back" else "pruned"
        self.console.print(
            f"  {what}: {', '.join(changes) or 'weights set to zero'}; precision {event['precision_before']:.2f} % → "
            f"{event['precision_after']:.2f} %"
        )

    def end(self, summary: Mapping[str, Any]) -> None:
        """The result."""
        self.console.print(describe(summary))


class BarObserver(LineObserver):
    """The same lines above a bar with the remaining time."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        super().__init__(self._progress.console)
        self._task: TaskID | None = None
        self._batches = self._done = 0

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Shows the bar."""
        super().start(config, done, epochs, batches)
        self._batches, self._done = batches, done
        self._task = self._progress.add_task("batches", total=epochs * batches, completed=done * batches)
        self._progress.start()

    def batch(self, number: int, loss: Tensor) -> None:
        """Moves the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=self._done * self._batches + number)

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """The epoch's figures."""
        super().epoch(metrics, counts)
        self._done = metrics["epoch"]

    def close(self) -> None:
        """Gives the terminal back."""
        self._progress.stop()
