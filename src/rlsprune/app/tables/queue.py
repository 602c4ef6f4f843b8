"""Running a table: rates are tuned on held-out images, then every cell is run; what is finished is not run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.recipes import rate_of
from rlsprune.app.experiments.jobs import RunFailedError, Runner, run_all
from rlsprune.app.experiments.queue import PlannedRun
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.tables.plan import ONE_SHOT, TABLES, Cell, Table, Tuned
from rlsprune.app.tables.records import Records, Tuning

__all__ = ["TableQueue", "next_rate"]

RATES = (0.5, 1.0, 2.0)
"""Multiples of the default rate that are tried first; those after them go where it gets better."""
_PRUNE_AT = 0.4
"""The share of the epochs after which a one-shot method prunes in its last trial, with the best rate."""

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TableQueue:
    """The runs of one table.

    Args:
        name: One of `TABLES`.
        runs: The folder in which runs are made.
        records: The folder in which their records are kept.
        machine: The fields of configs that depend on the machine: `data_dir`, `verify`, `threads`, `device`.
        say: Told what has been done.
        limit: Cells to run at most; None for all.
        methods: Those to tune and run; None for all of the table's.
        retry: Also what failed before is tried again.
        runner: Where runs are executed; None for processes on this machine.
    """

    name: str
    runs: Path
    records: Path
    machine: dict[str, Any]
    say: Say = print
    limit: int | None = None
    methods: Collection[str] | None = None
    retry: bool = False
    runner: Runner | None = None

    @property
    def table(self) -> Table:
        """What is declared."""
        return TABLES[self.name]

    @property
    def kept(self) -> Records:
        """The table's records."""
        return Records(self.records / self.name)

    @property
    def tuning(self) -> Tuning:
        """The trials of the table's experiment, which its tables share."""
        return Tuning(self.records / f"tuning-{self.table.experiment}.json")

    def tune(self) -> None:
        """Makes the trials that are missing, as many for every method."""
        for way in self._asked(self.table.ways()):
            default = rate_of(self.table.experiment, way.method, way.optimizer)
            one_shot = way.method in ONE_SHOT
            for choice in self.tuning.failed(way) if self.retry else ():
                self._try(way, choice)
            for number in range(self.table.trials - one_shot):
                tried = self.tuning.rates(way)
                if len(tried) <= number:
                    self._try(way, Tuned(RATES[number] * default if number < len(RATES) else next_rate(tried)))
            if one_shot:
                self._try(way, Tuned(self.tuning.best(way).lr, _PRUNE_AT))

    def run(self, jobs: int) -> None:
        """Runs the cells that are missing, cheapest first."""
        tuning = self.tuning
        kept = self.kept
        again = [cell for cell in self._asked(self.table.cells()) if self.retry and kept.failure(cell) is not None]
        cells = [cell for cell in self._asked(self.table.cells()) if cell in again or not kept.done(cell)]
        runs = {}
        for cell in cells[: self.limit]:
            config = self._in_time(cell, tuning.best(cell))
            if config is None:
                self.say(f"{cell.label}: waits for rls of {self.table.timed}")
            else:
                runs[cell] = self._planned(cell, config, self.runs / self.name)
        self._run(runs, jobs, self._note)

    def _asked(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.methods is None or cell.method in self.methods]

    def _in_time(self, cell: Cell, choice: Tuned) -> RunConfig | None:
        """A cell's config, with the time of `rls` if the table has that; None if that is not known yet."""
        if self.table.timed is None:
            return self.table.config(cell, choice, **self.machine)
        source = Records(self.records / self.table.timed)
        of_rls = self.table.source_of(cell if cell.size else replace(cell, size=self.table.tuned_size))
        summary = source.summary(of_rls)
        if summary is None:
            return None
        return self.table.config(cell, choice, cpu_seconds=round(summary["cpu_seconds"], 1), **self.machine)

    def _planned(self, cell: Cell, config: RunConfig, out: Path) -> PlannedRun:
        folder = (out / cell.label).resolve()
        if cell.method != "scratch":
            return PlannedRun(cell.label, config, folder)
        shape = (self.runs / (self.table.timed or self.name) / self.table.source_of(cell).label).resolve()
        return PlannedRun(cell.label, replace(config, shape_from=str(shape)), folder, after=shape)

    def _note(self, cell: Cell, summary: dict[str, Any] | None, error: str) -> None:
        if summary is None:
            self.kept.keep_failure(cell, error)
            self.say(f"{cell.label}: failed ({error})")
            return
        self.kept.keep(cell, RunFolder(self.runs / self.name / cell.label))
        self.say(f"{cell.label}: {summary['accuracy']:.2f} % with {summary['weights_percent']:.1f} % of the weights")

    def _try(self, way: Cell, choice: Tuned) -> None:
        """Makes a trial, on held-out images, unless it has been made."""
        tuning, cell = self.tuning, replace(way, seed=0)
        if tuning.tried(way, choice) and not (self.retry and choice in tuning.failed(way)):
            return
        folder = self.runs / f"tuning-{self.table.experiment}"
        config = self.table.config(cell, choice, **{**self.table.tuning, **self.machine, "test_on": "held-out"})
        planned = PlannedRun(cell.label, config, (folder / _name_of(cell, choice)).resolve())
        if cell.method == "scratch":
            of_rls = self.table.source_of(cell)
            shape = (folder / _name_of(of_rls, tuning.best(of_rls))).resolve()
            planned = replace(planned, config=replace(config, shape_from=str(shape)), after=shape)

        def note(cell: Cell, summary: dict[str, Any] | None, error: str) -> None:
            tuning.add(cell, choice, summary)
            result = f"failed ({error})" if summary is None else f"{summary['accuracy']:.2f} % of held-out images"
            self.say(f"tuning {cell.way}, {choice}: {result}")

        self._run({cell: planned}, 1, note)

    def _run(
        self, runs: dict[Cell, PlannedRun], jobs: int, note: Callable[[Cell, dict[str, Any] | None, str], None]
    ) -> None:
        """Runs, and tells how each ended; one that failed does not end the others."""
        cells = {run.folder: cell for cell, run in runs.items()}

        def failed(run: PlannedRun, error: RunFailedError) -> None:
            said = str(error).partition("failed with ")[2].replace(str(run.folder), run.label)
            note(cells[run.folder], None, said)

        run_all(
            list(runs.values()),
            jobs,
            lambda run, summary, before: note(cells[run.folder], summary, ""),
            self.runner,
            failed,
        )


def next_rate(tried: Mapping[float, float | None]) -> float:
    """Where to look for a better rate: beyond the best one if it is the highest or lowest, else beside it.

    Args:
        tried: Rate → held-out accuracy; None if the run failed.
    """
    score = {rate: -1.0 if accuracy is None else accuracy for rate, accuracy in tried.items()}
    best = max(score, key=lambda rate: score[rate])
    above, below = ([rate for rate in score if sign * (rate - best) > 0] for sign in (1, -1))
    if not above:
        return 2 * best
    if not below:
        return best / 2
    neighbours = (min(above), max(below))
    return math.sqrt(best * max(neighbours, key=lambda rate: score[rate]))


def _name_of(cell: Cell, choice: Tuned) -> str:
    late = "" if choice.prune_at is None else f"-at-{choice.prune_at:g}"
    return f"{cell.way}-{choice.lr:g}{late}"
