"""Downloads on request: mirrors are tried in order, downloads are resumed, and files are checked before renaming."""

from __future__ import annotations

import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from rlsprune.app.data import catalog
from rlsprune.app.data.catalog import RemoteFile
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.streams import md5_of
from rlsprune.io.atomic import flush
from rlsprune.io.lock import InUseError, exclusive

DownloadProgress = Callable[[str, int, int], None]
"""Callback with the file's name, its bytes so far and its total bytes."""

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte
_ATTEMPTS = 5  # per mirror, as long as each attempt brings new bytes


class _MirrorError(Exception):
    """An error of one mirror, after which the next is tried."""


def get(
    name: str, data_dir: str | os.PathLike[str] | None = None, progress: DownloadProgress | None = None
) -> list[Path]:
    """Downloads the files of a data set that are not there yet.

    Args:
        name: as in `load`; "digits" needs no files.
        data_dir: the data folder; None for `RLSPRUNE_DATA`, or the user's cache folder.
        progress: callback for every piece that arrives.

    Returns:
        The files, all with the published checksum.

    Raises:
        DataError: the data set is unknown, no mirror had a file, or the folder cannot be written. Partial downloads
            stay beside the target as `.part` files, and the next call continues from there.
    """
    dataset = catalog.entry(name)
    if not dataset.downloads:
        return []
    folder = catalog.data_folder(data_dir) / dataset.folders[0]
    return [fetch(file, folder, progress) for file in dataset.downloads]


def fetch(file: RemoteFile, folder: str | os.PathLike[str], progress: DownloadProgress | None = None) -> Path:
    """Downloads one file into a folder, unless it is there with the right checksum.

    The file gets its name only when it is complete, verified and on disk.

    Raises:
        DataError: see `get`.
    """
    target = Path(folder) / file.name
    with _blame_folder(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        if not (target.is_file() and md5_of(target) == file.md5):
            _fetch_from_mirrors(file, target, progress or _silent)
    return target


def _fetch_from_mirrors(file: RemoteFile, target: Path, progress: DownloadProgress) -> None:
    part = target.with_name(target.name + ".part")
    failures = []
    for url in file.urls:
        for _ in range(_ATTEMPTS):
            start = _size(part)
            try:
                with _blame_folder(target):
                    _require_space(target.parent, file.size - start)
                    _download(url, file, part, progress)
                    _publish(part, target, file)
                return
            except _MirrorError as error:
                failures.append(f"{url}: {error}")
            # Another attempt is worthwhile if this one brought bytes, or started from bytes that proved wrong.
            if _size(part) == start:
                break
    listed = "; ".join(dict.fromkeys(failures))
    remedy = f"Check the connection and run the command again, or put the file at {target} yourself"
    raise DataError(file.name, f"no mirror could give it ({listed})", remedy)


def _download(url: str, file: RemoteFile, part: Path, progress: DownloadProgress) -> None:
    """Appends to the part file until it has the published size."""
    start = _size(part)
    if start > file.size:
        part.unlink()
        start = 0
    if start == file.size:
        return
    headers = {"User-Agent": "rlsprune", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _network():
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink()  # it is not the beginning of this mirror's file
            raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            start = 0  # the server sends the whole file
        elif _range_start(response) != start:
            part.unlink(missing_ok=True)
            raise _MirrorError("it sent a part of the file that was not requested")
        with part.open("r+b" if start else "wb") as output:
            output.seek(start)
            _copy(response, output, file, start, progress)


def _copy(
    response: http.client.HTTPResponse, output: BinaryIO, file: RemoteFile, start: int, progress: DownloadProgress
) -> None:
    done = start
    progress(file.name, done, file.size)
    try:
        while True:
            with _network():
                chunk = response.read(_CHUNK)
            if not chunk:
                break
            done += len(chunk)
            if done > file.size:
                output.truncate(0)
                raise _MirrorError(f"it sent more than the {file.size:,} bytes of the file")
            output.write(chunk)
            progress(file.name, done, file.size)
    finally:
        output.flush()
        os.fsync(output.fileno())
    if done < file.size:
        raise _MirrorError(f"the connection ended after {done:,} of {file.size:,} bytes")


def _publish(part: Path, target: Path, file: RemoteFile) -> None:
    """Gives the part file its final name if its checksum is the published one, else removes it."""
    actual = md5_of(part)
    if actual != file.md5:
        part.unlink()
        raise _MirrorError(f"what it sent has the MD5 {actual}, not {file.md5}")
    part.replace(target)
    flush(target.parent)


@contextmanager
def _network() -> Iterator[None]:
    """Turns errors of the network into `_MirrorError`, to tell them from errors of the disk: both are OSError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise _MirrorError(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _MirrorError(str(error.reason)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _MirrorError(str(error) or type(error).__name__) from error


@contextmanager
def _blame_folder(target: Path) -> Iterator[None]:
    try:
        yield
    except InUseError:
        raise
    except OSError as error:
        problem = f"it cannot be written ({error.strerror or error})"
        remedy = "Free some space, make the folder writable, or choose another with --data-dir or RLSPRUNE_DATA"
        raise DataError(target, problem, remedy) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps two processes from writing one part file."""
    with ExitStack() as held:
        try:
            with _blame_folder(folder):
                held.enter_context(exclusive(folder / ".lock"))
        except InUseError as error:
            raise DataError(folder, f"another process is downloading into it ({error})", "Wait for it") from None
        yield


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed and {free:,} are free")


def _range_start(response: http.client.HTTPResponse) -> int | None:
    """Returns the first byte of a partial response, from `Content-Range: bytes 100-199/200`."""
    unit, _, span = response.headers.get("Content-Range", "").partition(" ")
    first = span.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdecimal() else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _silent(name: str, done: int, total: int) -> None:
    """Ignores progress."""
