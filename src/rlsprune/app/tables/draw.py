"""Tables and pictures, drawn from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsprune.app.config.settings import TARGETS
from rlsprune.app.experiments.figures import draw_costs
from rlsprune.app.experiments.table import aligned
from rlsprune.app.tables.plan import TABLES, Cell, Table
from rlsprune.app.tables.records import Records
from rlsprune.io.atomic import replacing

__all__ = ["draw", "table_page"]


@dataclass(frozen=True)
class _Row:
    """The runs of one method, recipe, optimizer and size."""

    cell: Cell
    """Of any seed."""
    summaries: list[dict[str, Any]]
    after_prune: list[float]
    """Accuracies right after the last event of runs that were pruned."""
    rate: float | None
    prune_epoch: int | None
    failed: int

    def mean(self, name: str) -> float:
        """The mean over the seeds."""
        return statistics.fmean(summary[name] for summary in self.summaries)

    def values(self, name: str) -> list[float]:
        """One for each seed."""
        return [summary[name] for summary in self.summaries]


def draw(name: str, records: Path) -> str:
    """Writes table.md and table.png beside the records of a table.

    Returns:
        What stands in table.md.

    Raises:
        ValueError: There are no records of it.
    """
    rows = _rows(TABLES[name], Records(records / name))
    page = table_page(name, records)
    with replacing(records / name / "table.md") as path:
        path.write_text(page, encoding="utf-8")
    curves: dict[str, list[dict[str, list[float]]]] = {}
    for row in rows:
        if row.summaries:
            costs = ("accuracy", "weights_percent", "flops_percent", "cpu_seconds")
            curves.setdefault(row.cell.way, []).append({key: row.values(key) for key in costs})
    draw_costs(curves, TABLES[name].title, records / name / "table.png")
    return page


def table_page(name: str, records: Path) -> str:
    """The table of a name in Markdown: accuracy by size, then every row with its costs.

    Raises:
        ValueError: There are no records of it.
    """
    table = TABLES[name]
    rows = _rows(table, Records(records / name))
    if not any(row.summaries or row.failed for row in rows):
        raise ValueError(f"{records / name} has no records: run the table first")
    runs = sum(len(row.summaries) for row in rows)
    parts = [
        f"## {table.title}",
        f"{runs} of {len(table.cells())} runs are done. Accuracy on the test images in %, mean ± deviation over seeds "
        f"(runs), by the share of the {TARGETS[table.target_of]} that is left.",
        _accuracies(table, rows),
        "The rate and, for one-shot methods, the epoch of the prune were chosen on held-out training images, with as "
        "many trials for every row. Processor time is that of training and pruning, on one thread.",
        _details(rows),
        f"Drawn by `python -m benchmarks.quality.tables draw {name}` from the records beside it, run by "
        f"`python -m benchmarks.quality.tables run {name} --data-dir DATA`.",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(table: Table, records: Records) -> list[_Row]:
    cells: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in table.cells():
        cells.setdefault((cell.way, cell.size), []).append(cell)
    rows = [_row(own, records) for own in cells.values()]
    order = {way: place for place, way in enumerate(dict.fromkeys(row.cell.way for row in rows))}
    return sorted(rows, key=lambda row: (order[row.cell.way], -(row.cell.size or 1.0)))


def _row(cells: Sequence[Cell], records: Records) -> _Row:
    finished = [cell for cell in cells if records.summary(cell) is not None]
    events = [
        [event for event in records.of(cell).read_lines("events") if event["kind"] == "prune"] for cell in finished
    ]
    config = records.config(finished[0]) if finished else None
    prunes = config is not None and any(events) and config.pruning is None and config.method != "soft-pruning"
    return _Row(
        cell=cells[0],
        summaries=[summary for cell in finished if (summary := records.summary(cell)) is not None],
        after_prune=[own[-1]["accuracy_after"] for own in events if own],
        rate=None if config is None else config.rate,
        prune_epoch=config.prune_epoch if config is not None and prunes else None,
        failed=sum(records.failure(cell) is not None for cell in cells),
    )


def _accuracies(table: Table, rows: Sequence[_Row]) -> str:
    sizes = sorted(table.sizes, reverse=True)
    columns: list[float | None] = [None, *sizes]
    by_place = {(row.cell.way, row.cell.size): row for row in rows}
    head = ["method, recipe, optimizer", "100", *(f"{100 * size:g}" for size in sizes)]
    lines = []
    for way in dict.fromkeys(row.cell.way for row in rows):
        cell = next(row.cell for row in rows if row.cell.way == way)
        found = [by_place.get((way, size)) for size in columns]
        lines.append([_name(cell), *("" if row is None else _accuracy(row) for row in found)])
    return aligned([head, *lines])


def _accuracy(row: _Row) -> str:
    if not row.summaries:
        return "diverged" if row.failed else "-"
    return f"{_spread(row.values('accuracy'), 2)} ({len(row.summaries)})"


def _details(rows: Sequence[_Row]) -> str:
    head = [
        *(
            "method, recipe, optimizer",
            "left %",
            "runs",
            "rate",
            "pruned after",
            "epochs",
            "after the prune",
            "accuracy",
        ),
        *("weights %", "FLOPs %", "latency ms", "processor s"),
    ]
    lines = [
        [
            _name(row.cell),
            "100" if row.cell.size is None else f"{100 * row.cell.size:g}",
            str(len(row.summaries)),
            "-" if row.rate is None else f"{row.rate:g}",
            "-" if row.prune_epoch is None else f"epoch {row.prune_epoch}",
            f"{row.mean('epochs'):.3g}",
            "-" if not row.after_prune else _spread(row.after_prune, 2),
            _spread(row.values("accuracy"), 2),
            f"{row.mean('weights_percent'):.1f}",
            f"{row.mean('flops_percent'):.1f}",
            f"{row.mean('latency_ms'):.2f}",
            f"{row.mean('cpu_seconds'):.0f}",
        ]
        for row in rows
        if row.summaries
    ]
    return aligned([head, *lines])


def _name(cell: Cell) -> str:
    return f"{cell.method}, {cell.recipe}, {cell.optimizer}"


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean
