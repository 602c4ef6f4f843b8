"""The output of a run in progress: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from rlsprune.app.config.metrics import METRICS, metric_of
from rlsprune.app.config.settings import TARGETS
from rlsprune.app.run.observer import Observer, Observers
from rlsprune.model.arguments import printable

if TYPE_CHECKING:
    from rlsprune.app.run.method import Retained

__all__ = ["LineObserver", "describe", "name_run", "observer", "status"]


def observer(quiet: bool, loggers: Sequence[str] = (), folder: Path | None = None) -> Observer:
    """Returns one observer for standard output and for the loggers of the run in that folder."""
    if loggers and folder is not None:
        from rlsprune.app.run.loggers import make_logger

        return Observers(observer(quiet), *(make_logger(name, folder) for name in loggers))
    if quiet:
        return Observer()
    if not sys.stdout.isatty():
        return LineObserver()
    from rlsprune.app.cli.live import LiveObserver

    return LiveObserver()


@contextmanager
def status(quiet: bool) -> Iterator[tuple[Callable[[str], object], Callable[[str, int, int | None], object]]]:
    """Yields two functions for long work: one prints a line, the other moves a bar below the lines on a terminal."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        shown: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage not in shown:
                for task in shown.values():
                    bar.remove_task(task)
                shown.clear()
                shown[stage] = bar.add_task(stage, total=total)
            bar.update(shown[stage], completed=done)

        yield (lambda line: None) if quiet else console.print, progress


def name_run(run: Mapping[str, Any]) -> str:
    """Makes the name of a run from its config or its summary: method, network and seed."""
    method, optimizer = run["method"], run.get("optimizer", run["method"])
    if method in ("rls", "none") and optimizer != method:  # the method says how to prune, not how to train
        method = f"{optimizer} {'without' if method == 'none' else 'with'} pruning"
    return f"{method} on {run['experiment']}, seed {run['seed']}"


def describe(summary: Mapping[str, Any]) -> str:
    """Describes a finished run in one line."""
    metric = metric_of(summary)
    return printable(
        f"{name_run(summary)}: {metric.label} "
        f"{metric.text(summary[metric.name])}, {summary['weights_percent']:.1f} % of the weights, "
        f"{summary['flops_percent']:.1f} % of the FLOPs, {summary['seconds']:.0f} s"
    )


class LineObserver(Observer):
    """Prints a line per epoch and per event."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._epochs, self._share_of, self.metric = 0, "parameters", METRICS["accuracy"]

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Prints the name of the run."""
        self._epochs, self.metric = epochs, metric_of(config)
        self._share_of = TARGETS[(config.get("pruning") or {}).get("target_of", "params")]
        resumed = f", resumed after epoch {done}" if done else ""
        self.console.print(printable(f"{name_run(config)}, {epochs} epochs{resumed}"))

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Prints the epoch's figures."""
        shape = "-".join(str(count.channels) for count in counts.values())
        self.console.print(
            f"epoch {metrics['epoch']:>{len(str(self._epochs))}}/{self._epochs}  loss {metrics['train_loss']:.4f}  "
            f"{self.metric.label} {self.metric.text(metrics[self.metric.name])}  "
            f"weights {metrics['weights_percent']:.1f} %  channels {shape}  {metrics['seconds']:.1f} s"
        )

    def event(self, event: Mapping[str, Any]) -> None:
        """Prints what was pruned."""
        changes = [
            f"{layer['name']} {layer['before']}→{layer['after']}"
            for layer in event["layers"]
            if layer["before"] != layer["after"]
        ]
        what = "rolled back" if event["kind"] == "roll-back" else "pruned"
        self.console.print(
            f"  epoch {event['epoch']}: {what} {', '.join(changes) or 'weights set to zero'}; "
            f"{self.metric.label} {self.metric.text(event[f'{self.metric.name}_before'])} → "
            f"{self.metric.text(event[f'{self.metric.name}_after'])}"
        )

    def end(self, summary: Mapping[str, Any]) -> None:
        """Prints the result."""
        self.console.print(describe(summary))
        if summary.get("missed_target") is not None:
            self.console.print(
                f"The target, {100 * summary['missed_target']:g} % of the {self._share_of}, is not reached in these "
                "epochs. More --epochs or a larger --tolerance get further."
            )
