"""A line on the terminal that says what long work is doing. Silent where nobody sees it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TextIO, TypeVar

__all__ = ["Progress", "shown_progress", "watched"]

_AFTER, _EVERY = 0.5, 0.1  # seconds: work that is done at once shows nothing
_WIDTH = 24


Progress = Callable[[str, int, int | None], object]
"""Callback for progress: takes the name of the stage, the amount done, and the total, if that is known."""

_Item = TypeVar("_Item")


@contextlib.contextmanager
def shown_progress(given: Progress | None = None, stream: TextIO | None = None) -> Iterator[Progress]:
    """Yields the callback for progress: the given one, else a line on standard error if that is a terminal.

    Examples:
        >>> with shown_progress() as tell:
        ...     for number in range(3):
        ...         _ = tell("counting", number + 1, 3)
    """
    stream = sys.stderr if stream is None else stream
    if given is not None:
        yield given
    elif stream is None or not stream.isatty():
        yield lambda stage, done, total: None
    else:
        line = _Line(stream)
        try:
            yield line
        finally:
            line.clear()


def watched(items: Iterable[_Item], stage: str, tell: Progress) -> Iterator[_Item]:
    """Yields the items, and reports the progress before each."""
    total = len(items) if isinstance(items, Sized) else None
    for number, item in enumerate(items):
        tell(stage, number, total)
        yield item


class _Line:
    """One line that is written over and over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._next, self._shown = stream, time.monotonic() + _AFTER, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now < self._next and (total is not None or done):
            return
        self._next = now + _EVERY
        full = 0 if not total else min(_WIDTH, _WIDTH * done // total)
        bar = f" {'━' * full}{'╌' * (_WIDTH - full)} {done}/{total}" if total else f" {done}" if done else " …"
        text = f"{stage}{bar}"[: shutil.get_terminal_size().columns - 1]
        self._write(f"\r{text.ljust(self._shown)}")
        self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            self._write(f"\r{' ' * self._shown}\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, UnicodeError):  # a terminal that is gone must not end the work
            self._stream.write(text)
            self._stream.flush()
