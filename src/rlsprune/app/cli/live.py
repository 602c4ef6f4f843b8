"""The live display of a run on a terminal: progress, the loss and its gate, and the network as it shrinks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlsprune.app.cli.terminal import LineObserver

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlsprune.app.run.method import Retained

__all__ = ["LiveObserver"]

_GATED = {"train": "mean training loss", "batch": "loss of the last batch", "valid": "held-out loss"}
_LOOK_SECONDS = 0.25  # between two reads of a batch's loss, for which an accelerator has to stop
_WIDEST = 44  # characters of the widest layer's bar
_BESIDE = 44  # characters beside the bars
_OTHER_LINES = 9  # lines of the display beside the layers


class LiveObserver(LineObserver):
    """Shows events, which scroll by, and below them the present state of the run.

    Args:
        console: The console; None for that of the terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console or Console(highlight=False, markup=False, emoji=False))
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", justify="right"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._epoch_task = self._progress.add_task("epoch", total=None, text="")
        self._batch_task = self._progress.add_task("batch", total=None, text="")
        self._config: Mapping[str, Any] = {}
        self._layers: Sequence[Mapping[str, Any]] = ()
        self._done = self._batches = 0
        self._last: Mapping[str, Any] | None = None
        self._best: Mapping[str, Any] | None = None
        self._loss: float | None = None
        self._looked = 0.0
        # Created last, because it draws at once.
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=6, transient=True)

    # --- calls by the run ---------------------------------------------------------------------------------------------

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Starts the display."""
        super().start(config, done, epochs, batches)
        self._config, self._done, self._batches = config, done, batches
        self._progress.reset(self._epoch_task, total=epochs * batches, completed=done * batches, text=self._position())
        self._progress.reset(self._batch_task, total=batches, text=f"0/{batches}")
        self._live.start()

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Shows the layers, and the last figures of an earlier part of the run."""
        self._layers = layers
        for line in metrics:
            self._note(line)

    def batch(self, number: int, loss: Tensor) -> None:
        """Moves the bars, and reads the loss now and then."""
        if number == 1:  # a new epoch may have another pace
            self._progress.reset(self._batch_task, total=self._batches)
        self._progress.update(self._batch_task, completed=number, text=f"{number}/{self._batches}")
        self._progress.update(self._epoch_task, completed=self._done * self._batches + number, text=self._position())
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._loss, self._looked = float(loss), now

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Shows the epoch's figures."""
        self._done = metrics["epoch"]
        self._layers = metrics.get("layers") or self._layers
        self._note(metrics)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Prints the result, layer by layer."""
        self.console.print(_result(summary))
        super().end(summary)

    def close(self) -> None:
        """Releases the terminal."""
        self._live.stop()

    def _note(self, line: Mapping[str, Any]) -> None:
        self._last = line
        name = self.metric.name
        if self._best is None or self.metric.at_least_as_good(line[name], self._best[name]):
            self._best = line

    # --- the display --------------------------------------------------------------------------------------------------

    def _position(self) -> str:
        return f"{min(self._done + 1, self._epochs)}/{self._epochs}"

    def _render(self) -> RenderableType:
        figures = Table.grid(padding=(0, 2))
        figures.add_column(style="bold", min_width=9)
        for name, text in self._figures():
            figures.add_row(name, text)
        return Group("", self._progress, figures, "", *self._bars())

    def _figures(self) -> Iterator[tuple[str, Text]]:
        last, label = self._last, self.metric.label
        parts = [] if self._loss is None else [f"{self._loss:.4f} in this batch"]
        if last is not None:
            parts.append(f"{last['train_loss']:.4f} in epoch {last['epoch']}")
        yield "loss", Text(", ".join(parts) or "–")
        yield "gate", self._gate()
        if last is None or self._best is None:
            yield label, Text("–")
        else:
            best = f"  best {self.metric.text(self._best[self.metric.name])} in epoch {self._best['epoch']}"
            yield label, Text(self.metric.text(last[self.metric.name])).append(best, "dim")

    def _gate(self) -> Text:
        """Compares the loss of the gate with the level that it must fall below."""
        last = self._last
        level = None if last is None else last.get("gate_level")
        kind = _GATED.get(str(self._config.get("gate")), "loss")
        if last is not None and level is not None:
            loss = last["gate_loss"]
            what = "last prune, kept if" if last.get("pruning_ended") else "prunes when"
            text = Text(f"{what} the {kind} is below {level:.4f}")
            if last.get("pruned"):  # the loss is that of the network before the prune
                return text.append(f"; pruned after epoch {last['epoch']}", "dim")
            if loss is None:
                return text
            return text.append(f"; it is {loss:.4f}", "green" if loss < level else "yellow")
        if self._config.get("method") == "shrink":
            return Text("none: the network is shrunk when it is trained", "dim")
        if self._config.get("pruning") is None or self._config.get("method") == "none":
            return Text("none: this method does not wait for a loss", "dim")
        if last is not None and last["weights_percent"] < 100:
            return Text("pruning has ended", "dim")
        return Text(f"open from epoch {self._config.get('warmup_epochs', 0) + 1} on", "dim")

    def _bars(self) -> list[RenderableType]:
        """Draws a bar per layer: the channels that are left, and in grey the removed ones."""
        rows = max(3, self.console.height - _OTHER_LINES)
        shown = self._layers[:rows]
        full = [_full(layer) for layer in self._layers]
        widest, width = max(full, default=1) or 1, max(8, min(_WIDEST, self.console.width - _BESIDE))
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=9, max_width=16, no_wrap=True, overflow="ellipsis", style="bold")
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for layer, before in zip(shown, full, strict=False):
            was, now = (max(1, round(width * channels / widest)) for channels in (before, layer["channels"]))
            bar = Text("█" * now, "cyan").append("░" * (was - now), "dim").append(" " * (width - was))
            share = f"{layer['channels']:,} of {before:,}  {layer['nodes_percent']:5.1f} %"
            table.add_row(layer["name"], bar, share)
        hidden = len(self._layers) - len(shown)
        return [table, Text(f"… and {hidden} layers more", "dim")] if hidden else [table]


def _full(layer: Mapping[str, Any]) -> int:
    channels: int = layer["channels"]
    share: float = layer["nodes_percent"]  # equals the share of channels: each has the same number of nodes
    return round(100 * channels / share) if share else channels


def _result(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer")
    for name in ("channels", "left", "weights", "left"):
        table.add_column(name, justify="right")
    for layer in summary["layers"]:
        weights = (f"{layer['weights']:,}", f"{layer['weights_percent']:.1f} %") if layer["weights"] else ("", "")
        table.add_row(layer["name"], f"{layer['channels']:,}", f"{layer['nodes_percent']:.1f} %", *weights)
    return table
