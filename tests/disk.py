"""A disk that can be stopped before any operation, and that may then have lost whatever was not flushed to it."""

from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsprune.io import tensorfile

LOSSES = ("nothing", "contents", "all")
"""What a loss of power takes: nothing (a process that was killed), the content of files that were not flushed though
their names are on the disk, or both content and names."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class PowerLossError(BaseException):
    """The machine stops here: nothing that the program does after it reaches the disk."""


class Disk:
    """Counts the operations of the program on files under a folder, and stops it before one of them.

    Args:
        root: The folder. What is in it at the beginning is on the disk for good.
        stop_before: The number of the operation from which on none is carried out, from 0; None for none.
        failing: Raised instead of them; a loss of power, unless said otherwise.
    """

    def __init__(self, root: Path, stop_before: int | None = None, failing: BaseException | None = None) -> None:
        self.root, self.stop_before, self._failing = root, stop_before, failing or PowerLossError()
        self.operations: list[str] = []
        self._contents: dict[int, bytes] = {}  # by inode: as it was flushed
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}  # of a folder: names, inodes and which are folders
        self._held: list[int] = []  # handles that keep inodes from being used again
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in files)):
                self._remember(path)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs, its operations are counted."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "chmod", "write", "ftruncate"):
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(os, "open", self._counted_open(os.open))
            patch.setattr(io, "open", self._counted_file(io.open))
            patch.setattr(os, "fsync", self._fsync)
            patch.setattr(tensorfile, "save_file", self._counted("save_file", tensorfile.save_file))
            yield

    def restart(self, to: Path, lost: str) -> Path:
        """The folder as the machine finds it when it starts again."""
        self._rebuild(self.root, to, lost)
        return to

    def close(self) -> None:
        """Lets go of what was held."""
        for handle in self._held:
            os.close(handle)

    def _operate(self, name: str) -> None:
        if self.stop_before is not None and len(self.operations) >= self.stop_before:
            raise self._failing
        self.operations.append(name)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self._operate(name)
            return original(*args, **kwargs)

        return operation

    def _counted_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITING:
                self._operate("open")
            return original(path, flags, *args, **kwargs)

        return open_

    def _counted_file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode != "r" and "b" not in mode:  # what is written as text: it is written when it is closed
                self._operate("write_text")
            return original(path, mode, *args, **kwargs)

        return open_

    def _fsync(self, descriptor: int) -> None:
        """Takes note of what is safe from now on; the real disk need not be waited for."""
        self._operate("fsync")
        self._remember(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _remember(self, path: Path) -> None:
        self._held.append(handle := os.open(path, os.O_RDONLY))
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            self._entries[status.st_ino] = {
                entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in path.iterdir()
            }
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _rebuild(self, source: Path, to: Path, lost: str) -> None:
        if lost != "all":
            shutil.copytree(source, to)
            if lost == "contents":
                for path in (path for path in to.rglob("*") if path.is_file()):
                    path.write_bytes(self._kept((source / path.relative_to(to)).stat().st_ino, path.read_bytes()))
            return
        to.mkdir()
        self._rebuild_folder(source.stat().st_ino, to)

    def _rebuild_folder(self, inode: int, to: Path) -> None:
        for name, (child, is_folder) in self._entries.get(inode, {}).items():
            if is_folder:
                (to / name).mkdir()
                self._rebuild_folder(child, to / name)
            else:
                (to / name).write_bytes(self._kept(child, b""))

    def _kept(self, inode: int, content: bytes) -> bytes:
        """What is left of a file: as it was flushed, or half of it and noise."""
        return self._contents.get(inode, content[: len(content) // 2] + b"\0" * 7)
