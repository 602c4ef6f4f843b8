"""The folder of a run, and the options that go with --resume."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlsprune.app.cli import options
from rlsprune.app.config.experiment import RunConfig
from rlsprune.distributed.torchrun import leads, started_by_torchrun

if TYPE_CHECKING:
    from rlsprune.app.run.folder import RunFolder

__all__ = ["new_folder", "open_folder", "read_config", "refuse_other_options"]


def new_folder(name: str, out: Path | None) -> Path:
    """Returns the requested folder, which must not hold a run, or the first free folder of the default name.

    If there are several processes, rank 0 chooses.
    """
    if not started_by_torchrun():
        return _choose(name, out)
    from rlsprune.distributed.ranks import find_ranks

    ranks = find_ranks()
    chosen = _choose(name, out) if leads() else Path()
    return chosen if ranks is None else ranks.first(chosen)


def open_folder(path: Path) -> RunFolder:
    """Opens a run's folder, which only one of several processes writes."""
    from rlsprune.app.run.folder import FollowedFolder, RunFolder

    return RunFolder(path) if leads() else FollowedFolder(path)


def read_config(path: Path, of_fit: str, device: str | None, data_dir: Path | None) -> RunConfig:
    """Reads the config of a run of `rlsprune run`, with a device that this machine has.

    Args:
        path: The run's folder.
        of_fit: The remedy in the error if it is a run of `rlsprune fit`.
        device: The device; None for the run's own.
        data_dir: The folder of the data; None for the run's own.
    """
    from rlsprune.app.run.folder import RunFolder

    values = RunFolder(path).read_json("config")
    if "import_from" in values:
        raise ValueError(f"{path} holds a run of `rlsprune fit`: {of_fit}")
    config = RunConfig.from_dict(values)
    config = replace(config, device=options.usable_device(device or config.device))
    return config if data_dir is None else replace(config, data_dir=str(data_dir))


def _choose(name: str, out: Path | None) -> Path:
    from rlsprune.app.run.folder import RunFolder

    if out is not None:
        if RunFolder(out).started:
            raise ValueError(f"{out} already holds a run: resume it with `--resume {out}`, or give another --out")
        return out
    candidates = (Path("runs") / (f"{name}-{number}" if number > 1 else name) for number in range(1, 1_000_000))
    return next(path for path in candidates if not RunFolder(path).started)


def refuse_other_options(context: typer.Context, allowed: Collection[str]) -> None:
    """Raises ValueError with the names of options that make no sense with --resume."""
    given = [
        name
        for name in context.params
        if name not in allowed
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        names = ", ".join(name.replace("_", "-") for name in given)
        raise ValueError(f"--resume uses the run's own settings: leave out {names}")
