"""Files that are written whole or not at all, and the error for files that cannot be used."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["FileError", "quoted", "replacing"]

_MAX_LISTED = 8  # names in one message


class FileError(ValueError):
    """A file that cannot be loaded: says which file, what is wrong with it and what to do."""

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}; {remedy}")
        self.path = Path(path)
        self.problem = problem
        self.remedy = remedy


def quoted(names: Iterable[str]) -> str:
    """Names for a message: few, short, and with everything but ASCII escaped, so that no two look alike."""
    names = list(names)
    shown = ", ".join(ascii(name[:80]) for name in names[:_MAX_LISTED])
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` at the end, or vanishes if there is an error."""
    final = Path(os.path.realpath(path))  # through a symbolic link: replace its target, not the link
    if not final.parent.is_dir():
        raise FileNotFoundError(f"cannot write {os.fspath(path)}: there is no folder {final.parent}; make it first")
    if final.is_dir():
        raise IsADirectoryError(f"cannot write {os.fspath(path)}: it is a folder; give a file name in it")
    temporary = final.with_name(f".{final.stem[:64]}.{secrets.token_hex(6)}{final.suffix}")
    try:
        temporary.touch()
        # What writes to the path may give it other rights: it gets those of the file it replaces, or of a new one.
        mode = stat.S_IMODE((final if final.exists() else temporary).stat().st_mode)
        yield temporary
        temporary.chmod(mode)
        _flush(temporary)
        temporary.replace(final)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
