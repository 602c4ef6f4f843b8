"""Computations that stop half-way, hand out a value, and continue when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

__all__ = ["Lane"]

_Handed = TypeVar("_Handed")
_Result = TypeVar("_Result")


class _CancelledError(BaseException):
    """Unwinds a computation that nobody waits for any more."""


class Lane(Generic[_Handed]):
    """A function in a thread of its own that runs only while `advance` waits for it: one thread at a time works.

    A network's forward is the user's code, so it cannot be cut into pieces. But it can be stopped in the middle. It
    leaves costly work to the thread that advances it, by `outside`: a thread that computes keeps a team of threads of
    its own, and there may be hundreds of lanes.

    Examples:
        >>> lane = Lane(lambda lane: [lane.hand_out(lane.outside(lambda: 2 * number)) for number in (1, 2)])
        >>> lane.advance(), lane.advance(), lane.advance()
        (2, 4, None)
    """

    def __init__(self, work: Callable[[Lane[_Handed]], object]) -> None:
        """Starts nothing yet.

        Args:
            work: Function that is called with the lane, and calls its `hand_out`.
        """
        self._work = work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._handed: _Handed | None = None
        self._errand: Callable[[], object] | None = None
        self._brought: object = None
        self._error: BaseException | None = None
        self._cancelled = False

    def advance(self) -> _Handed | None:
        """Runs the work until it hands out its next value; returns None when the work is done.

        Raises:
            BaseException: The work raised it.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        elif not self._thread.is_alive():
            return None
        self._handed = None
        self._resume()
        while (errand := self._errand) is not None:
            self._errand = None
            try:
                self._brought = errand()
            except Exception as failure:  # it is the work's to catch
                self._error = failure
            self._resume()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._handed

    def _resume(self) -> None:
        self._go.release()
        self._stopped.acquire()

    def hand_out(self, value: _Handed) -> None:
        """Hands out a value and stops the work, which calls this, until the next `advance`."""
        self._handed = value
        self._wait()

    def outside(self, errand: Callable[[], _Result]) -> _Result:
        """Lets the thread that waits in `advance` run an errand of the work, and returns its result.

        Raises:
            Exception: The errand raised it.
        """
        self._errand = errand
        self._wait()
        brought, self._brought = self._brought, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return cast("_Result", brought)

    def _wait(self) -> None:
        if not self._cancelled:  # else the work has caught the error that was to end it
            self._stopped.release()
            self._go.acquire()
        if self._cancelled:
            raise _CancelledError

    def close(self) -> None:
        """Ends the work where it is."""
        self._cancelled = True
        if self._thread is not None and self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                self._work(self)
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._stopped.release()
