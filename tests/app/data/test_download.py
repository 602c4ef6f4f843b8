"""Downloads from a server on this machine that misbehaves in every way a mirror does."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlsprune.app.data import DataError, catalog, download, get
from rlsprune.app.data.catalog import CatalogEntry, LocalFile, RemoteFile
from rlsprune.app.data.download import fetch

CONTENT = bytes(range(256)) * 4000  # a little over a megabyte: several pieces
MD5 = hashlib.md5(CONTENT).hexdigest()
CUT = 400_000


class Server(ThreadingHTTPServer):
    """Answers each path in its own way and keeps a list of what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{behaviour}"

    def asked(self) -> list[str]:
        return [path for path, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        behaviour = self.path.strip("/")
        wanted = self.headers.get("Range")
        self.server.requests.append((behaviour, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        first_time = self.server.asked().count(behaviour) == 1
        match behaviour:
            case "good":
                self.answer(CONTENT, start)
            case "no-ranges":
                self.answer(CONTENT, 0)
            case "cut-once":
                self.answer(CONTENT, start, send=CUT if first_time else None)
            case "cut-always":
                self.answer(CONTENT, start, send=1000)
            case "empty":
                self.answer(CONTENT, start, send=0)
            case "corrupted":
                self.answer(CONTENT[:-1] + b"?", start)
            case "endless":
                self.answer(CONTENT * 3, start)
            case "unsatisfiable" if wanted:
                self.send_error(416)
            case "unsatisfiable":
                self.answer(CONTENT, 0)
            case "wrong-range":
                self.answer(CONTENT, start, claim=start + 7)
            case "moved":
                self.send_response(302)
                self.send_header("Location", self.server.url("good"))
                self.end_headers()
            case _:
                self.send_error(404)

    def answer(self, content: bytes, start: int, send: int | None = None, claim: int | None = None) -> None:
        body = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            first = start if claim is None else claim
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        with suppress(ConnectionError):  # the other side had enough
            self.wfile.write(body[:send])
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def remote(server: Server) -> Callable[..., RemoteFile]:
    return lambda *behaviours: RemoteFile("file.bin", len(CONTENT), MD5, tuple(map(server.url, behaviours)))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("behaviour", ["good", "no-ranges", "cut-once", "moved"])
def test_download(tmp_path: Path, remote: Callable[..., RemoteFile], behaviour: str) -> None:
    path = fetch(remote(behaviour), tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file.bin"]


def test_progress_goes_from_nothing_to_all(tmp_path: Path, remote: Callable[..., RemoteFile]) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(remote("good"), tmp_path, lambda *report: seen.append(report))
    assert seen[0] == ("file.bin", 0, len(CONTENT))
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_interrupted_then_resumed(tmp_path: Path, server: Server, remote: Callable[..., RemoteFile]) -> None:
    def stop_halfway(name: str, done: int, total: int) -> None:
        if done > CUT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote("good"), tmp_path, stop_halfway)
    assert names(tmp_path) == ["file.bin.part"]
    have = (tmp_path / "file.bin.part").stat().st_size
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:have]
    assert have > CUT

    fetch(remote("good"), tmp_path)
    assert server.requests == [("good", None), ("good", f"bytes={have}-")]
    assert names(tmp_path) == ["file.bin"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_cut_connection_is_resumed_at_once(tmp_path: Path, server: Server, remote: Callable[..., RemoteFile]) -> None:
    fetch(remote("cut-once"), tmp_path)
    assert server.requests == [("cut-once", None), ("cut-once", f"bytes={CUT}-")]


def test_the_next_mirror_goes_on_where_the_last_stopped(
    tmp_path: Path, server: Server, remote: Callable[..., RemoteFile]
) -> None:
    path = fetch(remote("cut-always", "good"), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests[-1] == ("good", "bytes=5000-")


@pytest.mark.parametrize("bad", ["missing", "corrupted", "endless", "empty"])
def test_bad_mirror_then_good(tmp_path: Path, server: Server, remote: Callable[..., RemoteFile], bad: str) -> None:
    path = fetch(remote(bad, "good"), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.asked() == [bad, "good"]
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("missing", "HTTP 404"),
        ("corrupted", f"not {MD5}"),
        ("endless", "more than the 1,024,000 bytes"),
        ("empty", "after 0 of"),
        ("cut-always", "after 5,000 of 1,024,000 bytes"),
    ],
)
def test_only_bad_mirrors(tmp_path: Path, remote: Callable[..., RemoteFile], bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        fetch(remote(bad, "missing"), tmp_path)
    assert "file.bin" in str(caught.value)
    assert str(tmp_path / "file.bin") in caught.value.remedy
    assert "file.bin" not in names(tmp_path)


def test_every_mirror_down(tmp_path: Path, server: Server) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    urls = (f"http://127.0.0.1:{port}/a", f"http://127.0.0.1:{port}/b", "nonsense", "http://[half/c")
    with pytest.raises(DataError, match="no mirror could give it") as caught:
        fetch(RemoteFile("file.bin", 10, MD5, urls), tmp_path)
    assert all(url in str(caught.value) for url in urls)


@pytest.mark.parametrize("behaviour", ["good", "no-ranges", "unsatisfiable", "wrong-range"])
@pytest.mark.parametrize("stale", [b"not its beginning", CONTENT + b"and more", b"x" * len(CONTENT)])
def test_a_part_file_that_is_not_a_beginning(
    tmp_path: Path, remote: Callable[..., RemoteFile], behaviour: str, stale: bytes
) -> None:
    (tmp_path / "file.bin.part").write_bytes(stale)
    assert fetch(remote(behaviour, "good"), tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_complete_part_file_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    path = fetch(RemoteFile("file.bin", len(CONTENT), MD5, ("http://127.0.0.1:1/",)), tmp_path)
    assert path.read_bytes() == CONTENT


def test_what_is_there_is_kept_and_what_is_damaged_replaced(
    tmp_path: Path, server: Server, remote: Callable[..., RemoteFile]
) -> None:
    path = fetch(remote("good"), tmp_path)
    fetch(remote("good"), tmp_path)
    assert len(server.requests) == 1
    path.write_bytes(CONTENT[:-1] + b"?")
    fetch(remote("good"), tmp_path)
    assert path.read_bytes() == CONTENT


def test_a_damaged_file_stays_until_a_good_one_is_there(tmp_path: Path, remote: Callable[..., RemoteFile]) -> None:
    (tmp_path / "file.bin").write_bytes(b"old")
    with pytest.raises(DataError):
        fetch(remote("corrupted"), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"old"


def test_disk_full_before_and_during(
    tmp_path: Path, server: Server, remote: Callable[..., RemoteFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda _: Usage(1000))
        with pytest.raises(DataError, match="1,024,000 bytes are needed and 1,000 are free") as caught:
            fetch(remote("good"), tmp_path)
    assert "--data-dir" in caught.value.remedy
    assert server.requests == []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(download.os, "fsync", full)
        with pytest.raises(DataError, match="No space left") as caught:
            fetch(remote("good", "good"), tmp_path)
    assert server.asked() == ["good"], "another mirror does not help a full disk"
    assert "file.bin" not in names(tmp_path)


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_folder_that_cannot_be_made(tmp_path: Path, remote: Callable[..., RemoteFile]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written") as caught:
        fetch(remote("good"), tmp_path / "file" / "folder")
    assert "RLSPRUNE_DATA" in caught.value.remedy


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_read_only_folder(tmp_path: Path, remote: Callable[..., RemoteFile]) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DataError, match="cannot be written"):
            fetch(remote("good"), tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_read_only_folder_as_any_user(
    tmp_path: Path, remote: Callable[..., RemoteFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)") as caught:
        fetch(remote("good"), tmp_path)
    assert "make the folder writable" in caught.value.remedy


def test_two_at_once(tmp_path: Path, remote: Callable[..., RemoteFile]) -> None:
    def second(name: str, done: int, total: int) -> None:
        with pytest.raises(DataError, match="another process is downloading"):
            fetch(remote("good"), tmp_path)

    assert fetch(remote("good"), tmp_path, second).read_bytes() == CONTENT


def test_get_puts_a_data_set_where_it_is_found(
    tmp_path: Path, remote: Callable[..., RemoteFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"all": LocalFile(("file.bin",), (MD5,))}
    entry = CatalogEntry("toy", "A toy", ("a",), ("toy-folder",), (layout,), (remote("good"),))
    monkeypatch.setattr(catalog, "ENTRIES", {"toy": entry})
    for data_dir, root in ((tmp_path / "here", tmp_path / "here"), (None, tmp_path / "cache" / "rlsprune")):
        paths = get("toy", data_dir)
        assert paths == [root / "toy-folder" / "file.bin"]
        assert catalog.locate(entry, data_dir)[1] == {"all": paths[0]}
    monkeypatch.setenv("RLSPRUNE_DATA", str(tmp_path / "env"))
    assert get("toy") == [tmp_path / "env" / "toy-folder" / "file.bin"]


def test_the_embedded_digits_need_no_download() -> None:
    assert get("digits") == []
