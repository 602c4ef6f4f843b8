"""What is kept of the runs of tables: small files, from which the tables are drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.tables.plan import Cell, Tuned

__all__ = ["Records", "Tuning"]


class Records:
    """The records of one table.

    Args:
        folder: Where they lie, a folder for each cell.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, cell: Cell) -> RunFolder:
        """A cell's record; it need not be there."""
        return RunFolder(self.folder / cell.label)

    def summary(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's summary, or None if it has not been run or has failed."""
        record = self.of(cell)
        return record.read_json("summary") if record.finished else None

    def failure(self, cell: Cell) -> str | None:
        """Why a cell's run failed; None if it did not."""
        path = self.folder / cell.label / "failed.json"
        return str(json.loads(path.read_text(encoding="utf-8"))["error"]) if path.is_file() else None

    def done(self, cell: Cell) -> bool:
        """Whether there is nothing more to run."""
        return self.of(cell).finished or self.failure(cell) is not None

    def keep(self, cell: Cell, source: RunFolder) -> None:
        """Copies what tables are drawn from out of a finished run; where its data lay is no part of it."""
        record = self.of(cell)
        config = source.read_json("config")
        shape = config["shape_from"]
        places = {"data_dir": None, "shape_from": None if shape is None else Path(shape).name}
        record.write_json("config", config | places)
        lines = source.read_lines("metrics")
        record.write_lines(
            "metrics", [{name: value for name, value in line.items() if name != "layers"} for line in lines]
        )
        record.write_lines("events", source.read_lines("events"))
        record.write_json("summary", source.read_json("summary"))
        (record.path / "failed.json").unlink(missing_ok=True)  # of an earlier attempt

    def keep_failure(self, cell: Cell, error: str) -> None:
        """Notes why a run failed, so that it is not tried again unless that is asked for."""
        self.of(cell).write_json("failed", {"error": error})

    def config(self, cell: Cell) -> RunConfig:
        """What a cell was run with."""
        return RunConfig.from_dict(self.of(cell).read_json("config"))


class Tuning:
    """What was tried to find rates, on held-out images, and what was chosen.

    Args:
        path: The file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, list[dict[str, Any]]] = {}
        """By `Cell.way`: what was tried, with the held-out accuracy and loss, both None if the run failed."""
        if path.is_file():
            self.trials = json.loads(path.read_text(encoding="utf-8"))

    def add(self, cell: Cell, choice: Tuned, summary: Mapping[str, Any] | None) -> None:
        """Adds a trial, or gives one that failed another result, and writes the file."""
        found = {name: None if summary is None else summary[name] for name in ("accuracy", "loss")}
        trials = self.trials.setdefault(cell.way, [])
        earlier = [trial for trial in trials if asdict(choice).items() <= trial.items()]
        for trial in earlier:
            trial.update(found)
        if not earlier:
            trials.append({**asdict(choice), **found})
        RunFolder(self.path.parent).write_json(self.path.stem, self.trials)

    def tried(self, cell: Cell, choice: Tuned) -> bool:
        """Whether the trial has been made."""
        wanted = asdict(choice)
        return any(wanted.items() <= trial.items() for trial in self.trials.get(cell.way, ()))

    def failed(self, cell: Cell) -> list[Tuned]:
        """The trials whose run failed."""
        trials = self.trials.get(cell.way, ())
        return [Tuned(trial["lr"], trial["prune_at"]) for trial in trials if trial["accuracy"] is None]

    def rates(self, cell: Cell) -> dict[float, float | None]:
        """Rates that were tried without another epoch of the prune, with their held-out accuracy."""
        trials = self.trials.get(cell.way, ())
        return {trial["lr"]: trial["accuracy"] for trial in trials if trial["prune_at"] is None}

    def best(self, cell: Cell) -> Tuned:
        """The trial with the highest held-out accuracy; of equals that with the lowest loss.

        Raises:
            ValueError: Nothing was tried, or everything failed.
        """
        found = [trial for trial in self.trials.get(cell.way, ()) if trial["accuracy"] is not None]
        if not found:
            raise ValueError(f"{self.path} has no trial of {cell.way} that trained: run `tables tune` first")
        chosen = max(found, key=lambda trial: (trial["accuracy"], -trial["loss"]))
        return Tuned(chosen["lr"], chosen["prune_at"])
