"""Files that are written whole or not at all, and the errors for files that cannot be read or written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from rlsprune.model.arguments import shown

__all__ = [
    "FileError",
    "StorageError",
    "check_name",
    "file_digest",
    "flush",
    "make_folder",
    "read_text",
    "replacing",
    "storing",
]

MAX_TEXT = 64 * 2**20
"""Largest number of bytes read from a text file. Parsed JSON takes a multiple of that in memory."""

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make the folder writable"),
}


class FileError(ValueError):
    """Raised for a file that cannot be loaded. Names the file, the problem and the remedy."""

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}; {remedy}")
        self.path = Path(path)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[FileError], tuple[Path, str, str]]:
        # By default an exception is rebuilt from its message alone, so it would not survive a worker process.
        return type(self), (self.path, self.problem, self.remedy)


class StorageError(OSError):
    """Raised for a failed write. Names the file, the reason and the remedy. The old content is intact."""

    def __init__(self, path: str | os.PathLike[str], cause: OSError) -> None:
        remedy = _REMEDIES.get(cause.errno or 0, "check the disk")
        reason = cause.strerror or str(cause)
        super().__init__(
            f"{os.fspath(path)} cannot be written ({reason}); what was there before is intact: {remedy} and try again"
        )
        self.errno = cause.errno
        self.path = Path(path)


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises TypeError if a path is no file name, and `FileError` if no system accepts it as one."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path is {shown(path)}: give the name of a file")
    if "\0" in os.fspath(path):
        raise FileError(repr(os.fspath(path)), "there is a NUL character in it", "give the name of a file")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path to write to. It replaces `path` at the end, or is removed if there is an error."""
    check_name(path)
    final = Path(os.path.realpath(path))  # through a symbolic link: replace its target, not the link
    if not final.parent.is_dir():
        raise FileNotFoundError(f"cannot write {os.fspath(path)}: there is no folder {final.parent}; make it first")
    if final.is_dir():
        raise IsADirectoryError(f"cannot write {os.fspath(path)}: it is a folder; give a file name in it")
    temporary = final.with_name(f".{final.stem[:64]}.{secrets.token_hex(6)}{final.suffix}")
    try:
        temporary.touch()
        # A writer may change the file's permissions: it gets those of the file that it replaces, or of a new one.
        mode = stat.S_IMODE((final if final.exists() else temporary).stat().st_mode)
        yield temporary
        temporary.chmod(mode)
        flush(temporary)
        temporary.replace(final)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    flush(final.parent)


@contextlib.contextmanager
def storing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the system's errors, such as missing space or permissions, into a `StorageError` about `path`."""
    try:
        yield
    except (StorageError, BlockingIOError):  # already reported; in use by another process
        raise
    except OSError as error:
        raise StorageError(path, error) from error


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, and flushes each of them to the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on the disk."""
    if os.name != "posix" and path.is_dir():
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content, as text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: str | os.PathLike[str], remedy: str) -> str:
    """Reads the text of an untrusted file.

    Raises:
        FileError: The file is missing, no regular file (a pipe or a device would never end), not UTF-8, or too large.
    """
    check_name(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(path, "it is not a regular file", remedy)
            content = file.read(MAX_TEXT + 1)
        if len(content) > MAX_TEXT:
            raise FileError(path, f"it is larger than the {MAX_TEXT:,} bytes that are read", remedy)
        return content.decode("utf-8")
    except FileNotFoundError as error:
        raise FileError(path, "there is no such file", remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, f"it cannot be read ({error})", remedy) from error
