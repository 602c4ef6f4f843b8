"""Executes a run for a command: shows its progress, writes its page, and says how to resume after an interruption."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsprune.app.cli import folders
from rlsprune.app.cli.speech import say
from rlsprune.app.config.metrics import metric_of
from rlsprune.distributed.torchrun import leads

if TYPE_CHECKING:
    from rlsprune.app.run.folder import RunFolder
    from rlsprune.app.run.observer import Observer

__all__ = ["Shown", "execute"]

Summary = dict[str, Any]

_COMPARED = (
    ("unpruned", "unpruned network, trained alike"),
    ("given", "given weights"),
    ("int8", "pruned network in 8-bit integers"),
)
"""Other networks whose scores are printed beside that of the run's network, by the prefix of their keys."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The output that the user wants from a run."""

    quiet: bool
    as_json: bool = False
    """Whether only the summary is printed, as JSON."""
    loggers: tuple[str, ...] = ()
    """The names of loggers of the run, some of `LOGGERS`."""

    @property
    def hidden(self) -> bool:
        """Returns whether no progress is shown; only one of several processes shows it."""
        return self.quiet or self.as_json or not leads()


def execute(
    command: str,
    path: Path,
    train: Callable[[RunFolder, Observer], Summary],
    shown: Shown,
    pictures: Callable[[Summary], dict[str, Callable[[Path], object]]] = lambda summary: {},
) -> None:
    """Starts or resumes a run and writes its page; for a finished run, writes missing files.

    Only rank 0 of several processes writes and prints.

    Args:
        command: "run" or "fit", to say how to resume.
        path: The run's folder.
        train: Function from the folder and an observer to the summary.
        shown: The output that the user wants.
        pictures: Function from the summary to the writers of further files by their names.
    """
    from rlsprune.app.cli.terminal import describe, observer
    from rlsprune.app.report import write_report

    folder = folders.open_folder(path)
    finished = folder.finished
    try:
        summary = train(folder, observer(shown.hidden, shown.loggers if leads() else (), path))
    except KeyboardInterrupt:
        if folder.started:
            say(f"Resume with: rlsprune {command} --resume {shlex.quote(str(path))}", err=True)
        raise
    if not leads():
        return
    files = {"report.html": lambda out: write_report([path], out), **pictures(summary)}
    missing = [name for name in files if not finished or not (path / name).is_file()]
    if missing:
        with folder.locked():
            for name in missing:
                files[name](path / name)
    if shown.as_json:
        say(json.dumps(summary))
        return
    if finished:
        say(f"{path} is finished. {describe(summary)}")
    if not shown.hidden:
        metric = metric_of(summary)
        for key, what in _COMPARED:
            if f"{key}_{metric.name}" in summary:
                label = f"{metric.label[0].upper()}{metric.label[1:]}"
                say(f"{label} of the {what}: {metric.text(summary[f'{key}_{metric.name}'])}")
        written = ("model.safetensors", "model.onnx", "model-int8.onnx", "predict.py", "pixels.png", "report.html")
        say(f"In {path}: {', '.join(name for name in written if (path / name).exists())}")
