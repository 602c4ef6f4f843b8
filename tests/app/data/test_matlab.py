"""SVHN's .mat files: agreement with SciPy's reader and writer, and files that lie."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.data.writers import damaged, mat_bytes, random_images, random_labels, svhn_variables
from rlsprune.app.data import DataError
from rlsprune.app.data.matlab import read_svhn

Save = Callable[[bytes], Path]


@given(st.integers(1, 12), st.integers(0, 99), st.booleans(), st.sampled_from(["u1", "i2", "f4", "f8", "u8"]))
@settings(max_examples=40, deadline=None)
def test_round_trip(save: Save, count: int, seed: int, compress: bool, dtype: str) -> None:
    images, labels = random_images(count, seed=seed), random_labels(count, seed)
    variables = svhn_variables(images, labels)
    variables["y"] = variables["y"].astype(dtype)
    x, y = read_svhn(save(mat_bytes(variables, compress)))
    assert x.flags.c_contiguous
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels)


def test_agrees_with_scipy_on_order_and_labels(save: Save) -> None:
    data = mat_bytes(svhn_variables(random_images(5000), random_labels(5000)))
    theirs = scipy.io.loadmat(io.BytesIO(data))
    x, y = read_svhn(save(data))
    np.testing.assert_array_equal(x, theirs["X"].transpose(3, 2, 0, 1))
    np.testing.assert_array_equal(y, theirs["y"].ravel() % 10)


def test_other_variables_and_any_order(save: Save) -> None:
    images, labels = random_images(3), random_labels(3)
    variables = svhn_variables(images, labels)
    reordered = {
        "note": "text",
        "s": {"a": 1},
        "c": np.array([1, "a"], object),
        "y": variables["y"],
        "X": variables["X"],
    }
    x, y = read_svhn(save(mat_bytes(reordered)))
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels)


def test_big_endian(save: Save) -> None:
    images, labels = random_images(2), random_labels(2)

    def element(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    def matrix(name: bytes, dims: list[int], kind: int, data: bytes) -> bytes:
        flags, shape = struct.pack(">II", 9, 0), struct.pack(f">{len(dims)}i", *dims)
        return element(14, element(6, flags) + element(5, shape) + element(1, name) + element(kind, data))

    data = b"MATLAB 5.0".ljust(124) + struct.pack(">H", 0x0100) + b"MI"
    data += matrix(b"X", [32, 32, 3, 2], 2, images.transpose(0, 1, 3, 2).tobytes())
    data += matrix(b"y", [2, 1], 4, np.where(labels == 0, 10, labels).astype(">u2").tobytes())
    x, y = read_svhn(save(data))
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels)


def variables_with(**changes: object) -> dict[str, object]:
    return {**svhn_variables(random_images(3), random_labels(3)), **changes}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"y": np.ones((3, 1), np.uint8)}, "does not hold the variable X"),
        ({"z": 1}, "variable X and y"),
        (variables_with(X="text"), "X is not an array of 4 dimensions of real numbers"),
        (variables_with(X={"a": 1}), "X is not an array"),
        (variables_with(X=np.zeros((32, 32, 3, 3), complex)), "X is not an array"),
        (variables_with(X=np.zeros((32, 32, 3, 3))), "X is float64 of shape"),
        (variables_with(X=np.zeros((32, 3, 32, 3), np.uint8)), "X is uint8 of shape"),
        (variables_with(y=np.ones((4, 1), np.uint8)), "y has shape"),
        (variables_with(y=np.array([[0], [1], [2]], np.uint8)), "whole numbers 1 to 10"),
        (variables_with(y=np.array([[11], [1], [2]], np.uint8)), "whole numbers 1 to 10"),
        (variables_with(y=np.array([[1.5], [1], [2]])), "whole numbers 1 to 10"),
        (variables_with(y=np.array([[np.nan], [1], [2]])), "whole numbers 1 to 10"),
    ],
)
@pytest.mark.parametrize("compress", [True, False])
def test_file_with_the_wrong_content(save: Save, variables: dict[str, object], message: str, compress: bool) -> None:
    with pytest.raises(DataError, match=message):
        read_svhn(save(mat_bytes(variables, compress)))


HEADER = b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM"


def compressed_claim(claim: int, actual: int) -> bytes:
    """X with so many images claimed and so many bytes there, all zero."""
    size = 3072 * claim
    body = struct.pack("<IIII", 6, 8, 9, 0) + struct.pack("<II4i", 5, 16, 32, 32, 3, claim)
    body += struct.pack("<I", 1 << 16 | 1) + b"X\0\0\0" + struct.pack("<II", 2, size)
    packed = zlib.compress(struct.pack("<II", 14, len(body) + size) + body + bytes(actual))
    return HEADER + struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header"),
        (b"\x89HDF\r\n\x1a\n" + bytes(200), "not a MATLAB level 5 file"),
        (b"MATLAB 7.3".ljust(124) + struct.pack("<H", 0x0200) + b"IM", "7.3 file is HDF5"),
        (HEADER, "does not hold"),
        (HEADER + b"\0", "tag"),
        (HEADER + struct.pack("<II", 14, 2**32 - 1), "but 0 are left"),
        (HEADER + struct.pack("<II", 99, 0), "type 99"),
        (HEADER + struct.pack("<II", 15, 4) + b"junk", "damaged"),
        (compressed_claim(100_000, 1000), "more than its compressed form can hold"),
        (compressed_claim(2, 1000), "ends too early|ends after"),
        (mat_bytes(variables_with())[:-40], "are left"),
    ],
)
def test_file_that_lies(save: Save, data: bytes, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        read_svhn(save(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def test_a_variable_there_twice(save: Save) -> None:
    data = mat_bytes(variables_with())
    with pytest.raises(DataError, match="X twice"):
        read_svhn(save(data + data[128:]))


PLAIN, PACKED = (mat_bytes(variables_with(), compress) for compress in (False, True))


def test_changed_pixels_are_noticed_by_zlib(save: Save) -> None:
    data = bytearray(PACKED)
    data[len(data) // 2] ^= 1
    with pytest.raises(DataError):
        read_svhn(save(bytes(data)))


@st.composite
def damaged_inside_zlib(draw: st.DrawFn) -> bytes:
    """Damage to one variable before it is compressed."""
    position, elements = 128, []
    while position < len(PLAIN):
        size = struct.unpack_from("<I", PLAIN, position + 4)[0] + 8
        elements.append(PLAIN[position : position + size])
        position += size
    hit = draw(st.integers(0, len(elements) - 1))
    elements[hit] = draw(damaged(elements[hit], head=80))
    packed = [zlib.compress(element, 1) for element in elements]
    return HEADER + b"".join(struct.pack("<II", 15, len(data)) + data for data in packed)


FILES = st.one_of(damaged(PLAIN), damaged(PACKED), damaged_inside_zlib())


def read_damaged(save: Save, data: bytes) -> None:
    try:
        images, labels = read_svhn(save(data))
    except DataError:
        return
    assert images.shape == (len(labels), 3, 32, 32)
    assert ((labels >= 0) & (labels < 10)).all()


@given(FILES)
@settings(max_examples=300, deadline=None)
def test_damaged_files(save: Save, data: bytes) -> None:
    read_damaged(save, data)


@pytest.mark.slow
@given(FILES)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_damaged_files(save: Save, data: bytes) -> None:
    read_damaged(save, data)
