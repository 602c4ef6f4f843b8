"""Reader of SVHN's cropped digits, `train_32x32.mat` and `test_32x32.mat`.

The files are in MATLAB's level 5 format ("MAT-File Format", The MathWorks), of which they use little: two plain numeric
arrays, X (32×32×3×N, bytes) and y (N×1, 1…10), each usually compressed. Only these are read, so that memory stays
bounded by checked sizes, and cells, structs, objects and functions, which a general reader would build, stay unread.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlsprune.app.data.formats import Images, Labels, checked_labels
from rlsprune.app.data.streams import CHUNK, MAX_BYTES, MAX_EXPANSION, Source, open_plain

_ByteOrder = Literal["<", ">"]

_IMAGE = (32, 32, 3)  # rows, columns, colours
_CLASSES = 10

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_INT8, _INT32, _UINT32 = 1, 5, 6
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC_CLASSES = range(6, 16)  # double … uint64
_COMPLEX = 0x08
_MAX_VARIABLES = 64
_MAX_NAME = 63
_MAX_DIMS = 32


def read_svhn(path: str | PathLike[str]) -> tuple[Images, Labels]:
    """Reads a file of SVHN's cropped digits.

    Args:
        path: `train_32x32.mat` or `test_32x32.mat`.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), in which the files' label 10 has become the digit 0.

    Raises:
        DataError: the file is damaged, or not one of SVHN's.
    """
    with open_plain(Path(path)) as source:
        arrays = _read_variables(source, {"X": 4, "y": 2})
        pixels, marks = arrays["X"], arrays["y"]
        if pixels.dtype != np.uint8 or pixels.shape[1:] != _IMAGE[::-1] or len(pixels) == 0:
            shape = pixels.shape[::-1]
            raise source.fail(f"X is {pixels.dtype} of shape {shape}, not uint8 of shape (32, 32, 3, count)")
        if marks.size != len(pixels) or 1 not in marks.shape:
            raise source.fail(f"y has shape {marks.shape[::-1]}, not ({len(pixels)}, 1) as X has it")
        labels = marks.reshape(-1)
        if not np.isin(labels, np.arange(1, _CLASSES + 1)).all():
            raise source.fail("y holds values other than the whole numbers 1 to 10")
        # A column-major array read in C order is (N, colour, column, row). It is swapped a slice at a time, because a
        # whole second copy would double the memory.
        for start in range(0, len(pixels), 4096):
            piece = pixels[start : start + 4096]
            piece[...] = piece.swapaxes(2, 3).copy()
        return pixels, checked_labels(path, labels.astype(np.int64) % _CLASSES, _CLASSES)


def _read_variables(file: Source, wanted: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    """Reads the named arrays, with dimensions reversed (C order); `wanted` gives their numbers of dimensions."""
    header = file.read(_HEADER, "header").tobytes()
    orders: dict[bytes, _ByteOrder] = {b"IM": "<", b"MI": ">"}
    order = orders.get(header[126:])
    if order is None or struct.unpack(f"{order}H", header[124:126])[0] != 0x0100:
        raise file.fail("it is not a MATLAB level 5 file (a level 7.3 file is HDF5: save it again with -v7)")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for _ in range(_MAX_VARIABLES):
        if file.capacity == 0:
            break
        kind, size = _tag(file, order)
        if size > file.capacity:
            raise file.fail(f"a variable should have {size:,} bytes, but {file.capacity:,} are left")
        file.capacity -= size
        body = matrix = Source(file.path, file.stream, size)
        if kind == _COMPRESSED:
            kind, matrix = _inflated(body, order)
        if kind != _MATRIX:
            raise file.fail(f"an element has the type {kind}; only arrays (type {_MATRIX}) are read")
        name, dims = _matrix_header(matrix, order)
        if name in wanted:
            if name in arrays:
                raise file.fail(f"it holds the variable {name} twice")
            if dims is None or len(dims) != wanted[name]:
                raise file.fail(f"{name} is not an array of {wanted[name]} dimensions of real numbers")
            arrays[name] = _matrix_numbers(matrix, order, name, dims)
            if matrix is not body:
                matrix.drain()  # up to zlib's own checksum
        body.skip(body.capacity, "variable")
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise file.fail(f"it does not hold the variable {' and '.join(missing)}")
    return arrays


def _matrix_header(source: Source, order: _ByteOrder) -> tuple[str, tuple[int, ...] | None]:
    """Reads the name of a matrix, and its dimensions if it is an array of real numbers."""
    flags = _element(source, order, {_UINT32: "u4"}, 8, "array flags")
    if len(flags) != 2:
        raise source.fail("a variable has no array flags")
    dims = _element(source, order, {_INT32: "i4"}, 4 * _MAX_DIMS, "dimensions").tolist()
    name = _element(source, order, {_INT8: "u1"}, _MAX_NAME, "name").tobytes().decode("ascii", "backslashreplace")
    plain = int(flags[0]) & 0xFF in _NUMERIC_CLASSES and not int(flags[0]) >> 8 & _COMPLEX
    return name, tuple(dims) if plain and all(size >= 0 for size in dims) else None


def _matrix_numbers(source: Source, order: _ByteOrder, name: str, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    numbers = _element(source, order, _NUMBERS, MAX_BYTES, f"{name} of shape {dims}")
    if len(numbers) != math.prod(dims):
        raise source.fail(f"{name} has {len(numbers):,} numbers for the shape {dims}")
    return numbers.reshape(dims[::-1])


def _element(source: Source, order: _ByteOrder, types: Mapping[int, str], limit: int, what: str) -> npt.NDArray[Any]:
    """Reads one data element of an allowed type and at most `limit` bytes, and the padding behind it."""
    kind, size = _tag(source, order, what)
    small = kind >> 16  # elements of up to four bytes sit in their own tag
    inline = struct.pack(f"{order}I", size)
    if small:
        kind, size, limit = kind & 0xFFFF, small, min(limit, 4)
    dtype = np.dtype(types.get(kind, "V1"))
    if kind not in types or size > limit or size % dtype.itemsize:
        raise source.fail(f"its {what} cannot be of type {kind} and {size:,} bytes")
    if small:
        data = np.frombuffer(inline[:size], dtype=np.uint8)
    else:
        data = source.read(size, what)
        source.skip(min(-size % 8, source.capacity), "padding")
    return data.view(dtype.newbyteorder(order)).astype(dtype, copy=False)


def _tag(source: Source, order: _ByteOrder, what: str = "tag") -> tuple[int, int]:
    first, second = struct.unpack(f"{order}II", source.read(8, what).data)
    return first, second


def _inflated(body: Source, order: _ByteOrder) -> tuple[int, Source]:
    """Returns the type of the element inside a compressed one, and a source of its unpacked bytes."""
    source = Source(body.path, _Inflate(body), body.capacity * MAX_EXPANSION)
    kind, size = _tag(source, order)
    if size > source.capacity:
        raise body.fail(f"a variable should unpack to {size:,} bytes, more than its compressed form can hold")
    source.capacity = size
    return kind, source


class _Inflate:
    """A zlib stream that unpacks at most the requested bytes at a time."""

    def __init__(self, packed: Source) -> None:
        self._packed = packed
        self._zlib = zlib.decompressobj()

    def readinto(self, buffer: memoryview) -> int:
        while not self._zlib.eof:
            packed = (
                self._zlib.unconsumed_tail
                or self._packed.read(min(CHUNK, self._packed.capacity), "packed data").tobytes()
            )
            data = self._zlib.decompress(packed, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not packed:
                raise self._packed.fail("its compressed data ends too early")
        return 0
