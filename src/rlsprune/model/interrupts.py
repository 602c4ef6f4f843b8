"""Holds Ctrl-C back, so that a change of several parts is made whole or not at all.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, inside ``finally`` blocks too. So a
block that changes a user's objects runs inside `uninterrupted`: Ctrl-C is noted there, and raised where the block asks
for it (`stop_if_interrupted`, at a place where an error undoes everything) or at its end, when everything is done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["interruptible", "stop_if_interrupted", "uninterrupted"]


class _Held:
    """Whether Ctrl-C was pressed while it was held back, and the handler to call."""

    def __init__(self) -> None:
        self.pressed = False
        self.handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal inside a block: notes it."""
        self.pressed = True

    @property
    def holding(self) -> bool:
        """Whether Ctrl-C is held back in this thread; only the main thread ever gets a signal."""
        return signal.getsignal(signal.SIGINT) == self.note and threading.current_thread() is threading.main_thread()

    def hold(self) -> bool:
        """Starts to hold Ctrl-C back. Returns False if it is held already, or could not be raised here anyway."""
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or handler == self.note or threading.current_thread() is not threading.main_thread():
            return False
        self.pressed = False
        signal.signal(signal.SIGINT, self.note)
        self.handler = handler
        return True

    def release(self) -> None:
        """Restores the handler of Ctrl-C."""
        if self.holding:
            signal.signal(signal.SIGINT, self.handler)

    def raise_noted(self) -> None:
        """Does what Ctrl-C would have done when it was pressed, if it was."""
        if self.pressed:
            self.pressed = False
            self.handler(signal.SIGINT, None)


_held = _Held()


class uninterrupted:  # noqa: N801  # used like a function, and a class so that Ctrl-C cannot come between
    """A block in which Ctrl-C is only noted; it is raised at the end of the outermost such block.

    Examples:
        >>> import signal
        >>> done = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("all of it")
        ... except KeyboardInterrupt:
        ...     print(done)
        ['all of it']
    """

    def __enter__(self) -> None:
        self._outermost = _held.hold()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._outermost:
            _held.release()
            _held.raise_noted()


class interruptible:  # noqa: N801
    """A block inside an `uninterrupted` one that lets Ctrl-C through, for a user's function that may take long."""

    def __enter__(self) -> None:
        self._released = _held.holding
        if self._released:
            _held.release()
            _held.raise_noted()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._released:
            _held.hold()


def stop_if_interrupted() -> None:
    """Raises `KeyboardInterrupt` if Ctrl-C was pressed since the `uninterrupted` block around it began."""
    if _held.holding:
        _held.raise_noted()
