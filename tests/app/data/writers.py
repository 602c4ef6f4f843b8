"""Writers of the file formats, for round trips and for files to damage."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.io
from hypothesis import strategies as st

RECORD = 3073


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def cifar_bytes(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def tar_gz_bytes(members: Mapping[str, bytes], style: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1, format=style) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def mat_bytes(variables: Mapping[str, Any], compress: bool = True) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, dict(variables), do_compression=compress)
    return buffer.getvalue()


def svhn_variables(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """X and y as SVHN has them, from (N, 3, 32, 32) and digits."""
    return {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]}


def random_images(count: int, shape: tuple[int, ...] = (3, 32, 32), seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def random_labels(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 10, count, dtype=np.uint8)


@st.composite
def damaged(draw: st.DrawFn, original: bytes, head: int = 256) -> bytes:
    """The file with some bytes changed (mostly near its head, where sizes stand), cut off, repeated or added to."""
    data = bytearray(original)
    anywhere = st.integers(0, len(data) - 1)
    place = st.one_of(st.integers(0, min(head, len(data)) - 1), anywhere)
    value = st.one_of(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), st.integers(0, 255))
    for position, byte in draw(st.lists(st.tuples(place, value), max_size=6)):
        data[position] = byte
    match draw(st.sampled_from(["keep", "cut", "add", "splice"])):
        case "cut":
            del data[draw(place) :]
        case "add":
            data += draw(st.binary(min_size=1, max_size=64))
        case "splice":
            start, end, at = sorted(draw(st.tuples(anywhere, anywhere, anywhere)))
            data[at:at] = data[start:end][:4096]
    return bytes(data)


def damaged_inside_gzip(original: bytes) -> st.SearchStrategy[bytes]:
    """Damage under the compression, which a checksum would otherwise hide from the reader."""
    return damaged(original).map(lambda data: gzip.compress(data, 1, mtime=0))
