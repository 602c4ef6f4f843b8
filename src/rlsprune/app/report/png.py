"""Small pictures as data addresses, without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable

__all__ = ["data_uri"]

Pixel = tuple[int, int, int]


def data_uri(pixels: Iterable[Pixel], width: int, height: int) -> str:
    """Encodes 8-bit RGB pixels, row by row from the top, as a PNG."""
    flat = bytes(value for pixel in pixels for value in pixel)
    rows = b"".join(b"\0" + flat[start : start + 3 * width] for start in range(0, len(flat), 3 * width))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
