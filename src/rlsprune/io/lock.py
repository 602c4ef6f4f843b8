"""A lock for one process at a time, which the system releases when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

from rlsprune.io.atomic import FileError

__all__ = ["InUseError", "exclusive"]

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_MAX_HOLDER = 200  # bytes of the holder's name that are read


class InUseError(BlockingIOError):
    """Raised if another process holds the lock."""


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock while the block runs.

    The lock is the system's, on the file's open handle: a file that a dead process left behind does not block.

    Args:
        path: A file for the lock. It is made if it is missing, names the holder, and stays.

    Raises:
        InUseError: Another process holds the lock; the message names it.
        FileError: The path exists and is not a regular file.
        OSError: The file cannot be made.
    """
    descriptor = _open(path)
    try:
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in _HELD:
                os.lseek(descriptor, 0, os.SEEK_SET)
                holder = os.read(descriptor, _MAX_HOLDER).decode("ascii", "replace").strip() or "another process"
                raise InUseError(
                    f"{path.parent} is in use by {holder}: wait until that is done, or end it first"
                ) from None
            warnings.warn(f"{path} cannot be locked ({error}): make sure that no other process uses it", stacklevel=4)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode("ascii", "replace"))
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Opens the file, or makes it. It follows no link and does not wait for a pipe."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise FileError(path, "it is not a regular file, which the lock needs", "remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(path, "it is not a regular file, which the lock needs", "remove it")
    return descriptor


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        os.lseek(descriptor, _MAX_HOLDER, os.SEEK_SET)  # behind the text, so that others can read it
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
