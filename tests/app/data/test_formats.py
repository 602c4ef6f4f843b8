"""idx and CIFAR-10 files: round trips, and files that lie."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from app.data.writers import (
    RECORD,
    cifar_bytes,
    damaged,
    damaged_inside_gzip,
    idx_bytes,
    random_images,
    random_labels,
    tar_gz_bytes,
)
from rlsprune.app.data import DataError, formats, streams
from rlsprune.app.data.formats import read_cifar_archive, read_cifar_batch, read_idx, read_idx_pair

Save = Callable[[bytes], Path]
MEMBERS = ("data_batch_1.bin", "test_batch.bin")


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """No more than this many bytes are allocated at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=8)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_idx_round_trip(save: Save, array: np.ndarray, packed: bool) -> None:
    data = idx_bytes(array)
    back = read_idx(save(gzip.compress(data, mtime=0) if packed else data))
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, array)


def test_idx_pair_has_a_channel_and_int64_labels(tmp_path: Path) -> None:
    images, labels = random_images(7, (5, 4)), random_labels(7)
    (tmp_path / "x").write_bytes(idx_bytes(images))
    (tmp_path / "y").write_bytes(gzip.compress(idx_bytes(labels), mtime=0))
    x, y = read_idx_pair(tmp_path / "x", tmp_path / "y")
    assert x.shape == (7, 1, 5, 4)
    assert y.dtype == np.int64
    np.testing.assert_array_equal(x[:, 0], images)
    np.testing.assert_array_equal(y, labels)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (random_images(3, (4, 4)), random_labels(2), "2 labels for the 3 images"),
        (random_images(3, (4,)), random_labels(3), "not that of images"),
        (random_images(0, (4, 4)), random_labels(0), "it holds nothing"),
        (random_images(3, (4, 4)), random_images(3, (1,)), "not that of labels"),
        (random_images(3, (4, 4)), np.array([1, 10, 2], np.uint8), "label 10 of image 1 is not between 0 and 9"),
    ],
)
def test_idx_files_that_do_not_belong_together(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray, message: str
) -> None:
    (tmp_path / "x").write_bytes(idx_bytes(images))
    (tmp_path / "y").write_bytes(idx_bytes(labels))
    with pytest.raises(DataError, match=message):
        read_idx_pair(tmp_path / "x", tmp_path / "y")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 are possible"),
        (b"\x00\x00\x0d\x01" + bytes(100), "magic number 00000d01"),
        (b"\x00\x00\x08\x09" + bytes(100), "magic number 00000809"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "at most 0 are possible"),
        (struct.pack(">BBBB1I", 0, 0, 8, 1, 10) + bytes(11), "bytes after the end"),
        (gzip.compress(struct.pack(">BBBB1I", 0, 0, 8, 1, 10) + bytes(9), mtime=0), "ends after 9 of 10"),
        (gzip.compress(struct.pack(">BBBB1I", 0, 0, 8, 1, 10) + bytes(11), mtime=0), "bytes after the end"),
        (gzip.compress(idx_bytes(random_labels(100)), mtime=0)[:-12], "damaged"),
    ],
)
def test_idx_file_that_lies(save: Save, data: bytes, message: str) -> None:
    path = save(data)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "rlsprune data get" in str(caught.value)


def test_a_gzip_bomb_is_not_unpacked(save: Save) -> None:
    bomb = gzip.compress(struct.pack(">BBBB1I", 0, 0, 8, 1, 10) + bytes(50_000_000), mtime=0)
    with at_most(4_000_000), pytest.raises(DataError, match="bytes after the end"):
        read_idx(save(bomb))


def test_a_gigabyte_is_not_allocated_for_a_claim(save: Save) -> None:
    claim = gzip.compress(struct.pack(">BBBB1I", 0, 0, 8, 1, 1 << 30) + bytes(1000), mtime=0)
    with at_most(4_000_000), pytest.raises(DataError, match="at most"):
        read_idx(save(claim))


def test_no_more_than_the_limit_even_if_it_is_there(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_BYTES", 999)
    with pytest.raises(DataError, match="at most 999"):
        read_idx(save(idx_bytes(np.zeros(1000, np.uint8))))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read_idx(tmp_path / "pipe")


def test_out_of_memory_is_said(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    path = save(idx_bytes(random_labels(3)))
    monkeypatch.setattr(streams.np, "empty", full)
    with pytest.raises(DataError, match="not enough memory"):
        read_idx(path)


def test_folder_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_idx(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read_idx(tmp_path / "absent")


def test_error_survives_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(DataError("file", "broken", "Mend it")))
    assert str(error) == "'file': broken. Mend it"
    assert isinstance(error, ValueError)


@given(st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_cifar_round_trip(save: Save, count: int, seed: int) -> None:
    images, labels = random_images(count, seed=seed), random_labels(count, seed)
    batch = cifar_bytes(images, labels)
    for x, y in (
        read_cifar_batch(save(batch)),
        read_cifar_archive(save(tar_gz_bytes({"folder/readme": b"x", f"folder/{MEMBERS[0]}": batch})), MEMBERS[:1])[
            MEMBERS[0]
        ],
    ):
        np.testing.assert_array_equal(x, images)
        np.testing.assert_array_equal(y, labels)
        assert y.dtype == np.int64


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archive_formats_with_long_names_in_the_way(save: Save, style: int) -> None:
    batch = cifar_bytes(random_images(1), random_labels(1))
    long = "a" * 60 + "/" + "b" * 90
    found = read_cifar_archive(save(tar_gz_bytes({long: b"?", **dict.fromkeys(MEMBERS, batch)}, style)), MEMBERS)
    assert sorted(found) == sorted(MEMBERS)


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD + 1])
def test_cifar_batch_of_a_wrong_size(save: Save, size: int) -> None:
    with pytest.raises(DataError, match="whole number of records"):
        read_cifar_batch(save(bytes(size)))
    with pytest.raises(DataError, match="whole number of records"):
        read_cifar_archive(save(tar_gz_bytes({MEMBERS[0]: bytes(size)})), MEMBERS[:1])


def test_cifar_label_out_of_range(save: Save) -> None:
    with pytest.raises(DataError, match="label 200 of image 1"):
        read_cifar_batch(save(bytes(RECORD) + b"\xc8" + bytes(RECORD - 1)))


def test_archive_without_a_member_or_with_one_twice(save: Save) -> None:
    batch = bytes(RECORD)
    with pytest.raises(DataError, match=r"does not hold test_batch\.bin"):
        read_cifar_archive(save(tar_gz_bytes({MEMBERS[0]: batch})), MEMBERS)
    twice = {"a/test_batch.bin": batch, "b/test_batch.bin": batch}
    with pytest.raises(DataError, match=r"holds test_batch\.bin twice"):
        read_cifar_archive(save(tar_gz_bytes(twice)), MEMBERS[1:])


def test_archive_that_reaches_out_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "archive"
    path.parent.mkdir()
    path.write_bytes(tar_gz_bytes({"../../test_batch.bin": bytes(RECORD), "/etc/evil": b"x"}))
    read_cifar_archive(path, MEMBERS[1:])
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_archive_with_a_link_in_place_of_a_member(save: Save) -> None:
    header = tarfile.TarInfo(MEMBERS[1])
    header.type, header.linkname = tarfile.SYMTYPE, "/etc/passwd"
    data = gzip.compress(header.tobuf() + bytes(1024), mtime=0)
    with pytest.raises(DataError, match=r"does not hold test_batch\.bin"):
        read_cifar_archive(save(data), MEMBERS[1:])


@pytest.mark.parametrize("size", [8**11 - 1, 400 << 20])
@pytest.mark.parametrize("type_", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_archive_member_that_claims_too_much(save: Save, size: int, type_: bytes) -> None:
    header = tarfile.TarInfo(MEMBERS[1])
    header.type, header.size = type_, size // RECORD * RECORD
    data = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(100_000), mtime=0)
    with at_most(8_000_000), pytest.raises(DataError):
        read_cifar_archive(save(data), MEMBERS[1:])


def test_archive_that_goes_on_and_on(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(20 << 20), mtime=0)
    with at_most(8_000_000), pytest.raises(DataError, match="unpacks to more"):
        read_cifar_archive(save(bomb), MEMBERS)


IDX = idx_bytes(random_images(4, (6, 5)))
BATCH = cifar_bytes(random_images(2), random_labels(2))
ARCHIVE = tar_gz_bytes(dict.fromkeys(MEMBERS, BATCH))
FILES = st.one_of(
    st.tuples(st.just("idx"), st.one_of(damaged(IDX), damaged(gzip.compress(IDX, mtime=0)), damaged_inside_gzip(IDX))),
    st.tuples(st.just("batch"), damaged(BATCH)),
    st.tuples(st.just("archive"), st.one_of(damaged(ARCHIVE), damaged_inside_gzip(gzip.decompress(ARCHIVE)))),
)


def read_damaged(save: Save, kind: str, data: bytes) -> None:
    """A damaged file is refused, or what comes out of it is sound."""
    try:
        if kind == "idx":
            array = read_idx(save(data))
            assert array.dtype == np.uint8
            return
        found = {"": read_cifar_batch(save(data))} if kind == "batch" else read_cifar_archive(save(data), MEMBERS)
    except DataError:
        return
    for images, labels in found.values():
        assert images.shape == (len(labels), 3, 32, 32)
        assert ((labels >= 0) & (labels < 10)).all()


@given(FILES)
@settings(max_examples=300, deadline=None)
def test_damaged_files(save: Save, file: tuple[str, bytes]) -> None:
    read_damaged(save, *file)


@pytest.mark.slow
@given(FILES)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_damaged_files(save: Save, file: tuple[str, bytes]) -> None:
    read_damaged(save, *file)
