"""The augmentation of images in training, given as one word. Light to import: no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Augmentation", "parse_augmentation"]


@dataclass(frozen=True)
class Augmentation:
    """The random changes that are drawn for every image in every epoch."""

    shift: int
    """The most pixels by which an image is moved each way, with black coming in."""
    flip: bool
    """Whether every second image is mirrored."""


def parse_augmentation(text: str) -> Augmentation:
    """Reads ``crop`` (shifts by up to 4 pixels), ``crop2`` (by up to 2, or another number), or either with ``+flip``.

    Raises:
        ValueError: The text is another word.
    """
    match = re.fullmatch(r"crop([1-9][0-9]?)?(\+flip)?", text)
    if match is None:
        raise ValueError(
            f"augment {text!r} is not valid: it must be crop (moves images by up to 4 pixels), crop2 (by up to 2, or "
            "another number), or either with +flip (mirrors every second one)"
        )
    return Augmentation(int(match[1] or 4), match[2] is not None)
