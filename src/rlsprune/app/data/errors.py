"""The error that reading, finding and downloading data raises."""

from __future__ import annotations

import os


class DataError(ValueError):
    """A data file or data set that cannot be used.

    The message names the file, the problem and the remedy.

    Args:
        where: the file, folder or data set.
        problem: the problem with it.
        remedy: the action that the user can take.
    """

    def __init__(self, where: str | os.PathLike[str], problem: str, remedy: str) -> None:
        self.where = os.fspath(where)
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{self.where!r}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str]]:
        # The default rebuilds an exception from its message alone, so it would not survive a worker process.
        return type(self), (self.where, self.problem, self.remedy)
