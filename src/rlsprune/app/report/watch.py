"""Keeps a page up to date while its runs are in progress."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlsprune.app.report.page import write_report
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError

__all__ = ["watch"]

_FILES = ("config.json", "metrics.jsonl", "events.jsonl", "summary.json")


def watch(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], every: float = 2.0) -> None:
    """Rewrites the page whenever a run has news, until all runs are finished.

    The last page does not reload itself, whether the runs end, Ctrl-C is pressed or an error is raised.

    Args:
        folders: The folders of the runs.
        out: The page's file.
        every: Seconds between two looks at the folders.

    Raises:
        FileError: A run's file is missing or damaged.
    """
    reload_seconds = max(1, round(every))
    seen: list[tuple[int, int] | None] = []
    try:
        while not all(RunFolder(folder).finished for folder in folders):
            stamps = [_stamp(Path(folder) / name) for folder in folders for name in _FILES]
            if stamps != seen:
                seen = stamps  # set before writing: Ctrl-C may come when the page is already written
                write_report(folders, out, reload_seconds=reload_seconds)
            time.sleep(every)
    except BaseException:
        if seen:
            with suppress(FileError, OSError):  # the error that ended the loop is the one to report
                write_report(folders, out)
        raise
    write_report(folders, out)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
