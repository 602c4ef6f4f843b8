"""Reads bytes from files that may be damaged or hostile, with exact lengths, bounded memory and one error type."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlsprune.app.data.errors import DataError

MAX_BYTES = 512 << 20
"""The largest size of one array of a data file; SVHN's training images, the largest known, take 225 MB."""

MAX_EXPANSION = 1032
"""The largest expansion of Deflate; a larger claim is refused before anything is allocated."""

CHUNK = 1 << 20
"""Number of bytes read at a time."""

GET_AGAIN = "Delete it and get it again with `rlsprune data get`, or put the original file there"


class Readable(Protocol):
    """A binary stream that fills a buffer."""

    def readinto(self, buffer: Any, /) -> int | None:
        """Reads up to the length of the buffer and returns the number of bytes; 0 at the end."""


@dataclass
class Source:
    """An open file, its path for error messages, and the most bytes that it can still give."""

    path: Path
    stream: Readable
    capacity: int
    remedy: str = GET_AGAIN

    def fail(self, problem: str) -> DataError:
        """Makes an error for this file; the caller raises it."""
        return DataError(self.path, problem, self.remedy)

    def read(self, count: int, what: str, limit: int | None = None) -> npt.NDArray[np.uint8]:
        """Reads exactly `count` bytes.

        Args:
            count: the number of bytes, refused before allocation if the file cannot hold them or they exceed the limit.
            what: the part of the file, for the message.
            limit: the most bytes that are read at all; None for `MAX_BYTES`.

        Raises:
            DataError: the file is too short, or the count is absurd.
        """
        possible = min(self.capacity, MAX_BYTES if limit is None else limit)
        if count > possible:
            raise self.fail(f"it should have {count:,} bytes of {what}, but at most {possible:,} are possible")
        array = np.empty(count, dtype=np.uint8)
        view, got = array.data, 0
        while got < count:
            step = self.stream.readinto(view[got : got + CHUNK])
            if not step:
                raise self.fail(f"it ends after {got:,} of {count:,} bytes of {what}")
            got += step
        self.capacity -= count
        return array

    def skip(self, count: int, what: str) -> None:
        """Reads `count` bytes and discards them, a piece at a time."""
        while count > 0:
            step = min(count, CHUNK)
            self.read(step, what)
            count -= step

    def drain(self) -> None:
        """Reads to the end, so that a decompressor checks its checksum."""
        buffer = bytearray(CHUNK)
        while step := self.stream.readinto(buffer):
            self.capacity -= step
            if self.capacity < 0:
                raise self.fail("it unpacks to more than it should")

    def expect_end(self) -> None:
        """Raises `DataError` if more bytes follow."""
        if self.stream.readinto(bytearray(1)):
            raise self.fail("there are bytes after the end of the data")


@contextmanager
def blame(path: Path, remedy: str = GET_AGAIN) -> Iterator[None]:
    """Turns errors of the system or of a decompressor into a `DataError` that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", remedy) from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(path, f"its compressed data is damaged ({error})", remedy) from error
    except MemoryError as error:
        raise DataError(path, "there is not enough memory to read it", "Free some memory and try again") from error
    except OSError as error:
        raise DataError(path, f"it cannot be read ({error.strerror or error})", "Check its permissions") from error


@contextmanager
def open_regular(path: Path, remedy: str = GET_AGAIN) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a regular file and yields it with its size; any error becomes a `DataError`."""
    with blame(path, remedy):
        # A pipe or a device would block or never end. The file is opened before the check, so it cannot be swapped.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(path, "it is not a regular file", remedy)
            yield file, status.st_size


@contextmanager
def open_plain(path: Path) -> Iterator[Source]:
    """Opens a regular file as it is."""
    with open_regular(path) as (file, size):
        yield Source(path, file, size)


@contextmanager
def open_maybe_gzip(path: Path) -> Iterator[Source]:
    """Opens a regular file, and unpacks it on the fly if its first bytes are those of gzip."""
    with open_regular(path) as (file, size):
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        if packed:
            with gzip.open(file, "rb") as stream:
                yield Source(path, stream, size * MAX_EXPANSION)
        else:
            yield Source(path, file, size)


def md5_of(path: Path) -> str:
    """Computes the hexadecimal MD5 of a file, the checksum that the publishers of these data sets give."""
    with open_regular(path) as (file, _):
        return hashlib.file_digest(file, _md5).hexdigest()


def _md5() -> Any:
    # It does not defend against forgery, and FIPS builds of OpenSSL refuse it without this flag.
    return hashlib.md5(usedforsecurity=False)
