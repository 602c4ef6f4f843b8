"""The processor time that a run has taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CpuClock"]


class CpuClock:
    """Counts this process's processor time while it is started, on top of what was used before.

    Args:
        used: Seconds that the run took before it was resumed.
    """

    def __init__(self, used: float = 0.0) -> None:
        self._used, self._since = used, float("nan")
        self._running = False

    @property
    def used(self) -> float:
        """Returns the seconds so far."""
        return self._used + (time.process_time() - self._since if self._running else 0.0)

    def start(self) -> None:
        """Counts from now on."""
        self._since, self._running = time.process_time(), True

    def stop(self) -> None:
        """Stops counting until it is started again."""
        self._used, self._running = self.used, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the clock while the block runs."""
        running = self._running
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()
