"""Readers of the idx files of MNIST and Fashion-MNIST and of the binary version of CIFAR-10.

Every size that a file claims is checked against the file's own size before memory is allocated. Nothing is unpickled or
unpacked to disk. A file that does not fit raises `DataError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlsprune.app.data.errors import DataError
from rlsprune.app.data.streams import GET_AGAIN, MAX_BYTES, Source, open_maybe_gzip, open_plain

Images = npt.NDArray[np.uint8]
"""(N, C, H, W)"""
Labels = npt.NDArray[np.int64]
"""(N,)"""

CIFAR_CLASSES = 10
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + math.prod(_CIFAR_SHAPE)  # a label byte, then the red, green and blue planes
_IDX_UBYTE = 0x08
_TAR_BLOCK = 512


def read_idx(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Reads an idx file of unsigned bytes, plain or gzipped.

    Args:
        path: the file, for example `train-images-idx3-ubyte.gz`.

    Returns:
        An array of the shape that the header states.

    Raises:
        DataError: the file is not an idx file, or shorter or longer than its header says.
    """
    with open_maybe_gzip(Path(path)) as source:
        magic = source.read(4, "magic number")
        if magic[0] or magic[1] or magic[2] != _IDX_UBYTE or not 1 <= magic[3] <= 4:
            raise source.fail(f"its magic number {magic.tobytes().hex()} is not that of an idx file of unsigned bytes")
        dims = source.read(4 * int(magic[3]), "dimensions").view(">u4").tolist()
        if not all(dims):  # the other dimensions may be of any size then
            raise source.fail(f"it holds nothing: its shape is {tuple(dims)}")
        array = source.read(math.prod(dims), f"data of shape {tuple(dims)}").reshape(dims)
        source.expect_end()
        return array


def read_idx_pair(images: str | PathLike[str], labels: str | PathLike[str], classes: int = 10) -> tuple[Images, Labels]:
    """Reads the images and the labels of one split of MNIST or Fashion-MNIST.

    Args:
        images: an idx3 file.
        labels: an idx1 file with as many entries.
        classes: the number of classes; labels must be below it.

    Returns:
        Images (N, 1, H, W) and labels (N,).

    Raises:
        DataError: either file is damaged, or they do not belong together.
    """
    pixels, marks = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or pixels.size == 0:
        raise DataError(images, f"its shape {pixels.shape} is not that of images (count, height, width)", GET_AGAIN)
    if marks.ndim != 1:
        raise DataError(labels, f"its shape {marks.shape} is not that of labels (count)", GET_AGAIN)
    if len(pixels) != len(marks):
        raise DataError(labels, f"it has {len(marks):,} labels for the {len(pixels):,} images of {images}", GET_AGAIN)
    return pixels[:, None], checked_labels(labels, marks, classes)


def read_cifar_batch(path: str | PathLike[str]) -> tuple[Images, Labels]:
    """Reads one `data_batch_N.bin` or `test_batch.bin` of the binary version of CIFAR-10.

    Args:
        path: the file.

    Returns:
        Images (N, 3, 32, 32) and labels (N,).

    Raises:
        DataError: the size is not a multiple of a record, or a label is not below 10.
    """
    with open_plain(Path(path)) as source:
        return _cifar_records(source, source.capacity)


def read_cifar_archive(path: str | PathLike[str], members: Sequence[str]) -> dict[str, tuple[Images, Labels]]:
    """Reads batches from `cifar-10-binary.tar.gz` without unpacking it to disk.

    Args:
        path: the archive.
        members: the file names to read, without folders.

    Returns:
        Images and labels by file name.

    Raises:
        DataError: a member is missing, occurs twice or is not a CIFAR-10 batch, or the archive is damaged.
    """
    found: dict[str, tuple[Images, Labels]] = {}
    with open_maybe_gzip(Path(path)) as source:
        source.capacity = min(source.capacity, MAX_BYTES)
        # The standard library's tarfile follows long-name chains, sparse maps and pax headers of any size. Six plain
        # members need none of that, so this loop walks the headers and skips unknown members.
        while (header := _tar_header(source)) is not None:
            name, size, regular = header
            if regular and name in members:
                if name in found:
                    raise source.fail(f"it holds {name} twice")
                found[name] = _cifar_records(source, size)
            else:
                source.skip(size, f"member {name!r}")
            source.skip(-size % _TAR_BLOCK, "padding")
        source.drain()  # up to gzip's own checksum
        missing = [member for member in members if member not in found]
        if missing:
            raise source.fail(f"it does not hold {', '.join(missing)}")
    return found


def checked_labels(path: str | PathLike[str], labels: npt.NDArray[np.uint8] | Labels, classes: int) -> Labels:
    """Returns labels as int64, or raises a `DataError` that names the first one outside 0…classes−1."""
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        problem = f"label {labels[outside[0]]} of image {outside[0]} is not between 0 and {classes - 1}"
        raise DataError(path, problem, GET_AGAIN)
    return labels.astype(np.int64)


def _cifar_records(source: Source, size: int) -> tuple[Images, Labels]:
    if size == 0 or size % _CIFAR_RECORD:
        raise source.fail(f"a batch of {size:,} bytes is not a whole number of records of {_CIFAR_RECORD} bytes")
    records = source.read(size, "records").reshape(-1, _CIFAR_RECORD)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *_CIFAR_SHAPE)
    return images, checked_labels(source.path, records[:, 0], CIFAR_CLASSES)


def _tar_header(source: Source) -> tuple[str, int, bool] | None:
    """Reads the next member's file name, size and whether it is a regular file; None at the archive's end."""
    block = source.read(_TAR_BLOCK, "tar header")
    if not block.any():
        return None
    field = block.tobytes()
    try:
        size, checksum = (int(field[at:end].rstrip(b"\0 "), 8) for at, end in ((124, 136), (148, 156)))
    except ValueError:
        raise source.fail("it is not a tar archive of plain files (a header has no octal size)") from None
    # The checksum is the sum of the header's bytes, with its own eight bytes counted as spaces.
    if size < 0 or checksum != int(block.sum()) - int(block[148:156].sum()) + 8 * ord(" "):
        raise source.fail("a header of the tar archive is damaged")
    name = field[:100].split(b"\0", 1)[0].decode("ascii", "backslashreplace").rsplit("/", 1)[-1]
    return name, size, field[156:157] in (b"0", b"\0")
