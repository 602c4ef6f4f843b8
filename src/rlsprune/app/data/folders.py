"""A user's own images from a folder with a sub-folder per class. Pillow reads them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.data.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["read_image_folder"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The formats that Pillow may read. It decides by the bytes, not by the ending, and some readers start programs."""
TEST_SHARE = 0.2
"""The share of the images in the test split if the folder has no test split."""
_TEST_NAMES = ("test", "val", "valid")
_GREY = ("1", "L", "LA", "I;16")

Channels = Literal[1, 3]


def read_image_folder(
    path: str | os.PathLike[str], image_size: int | None = None, channels: Channels | None = None, seed: int = 0
) -> Dataset:
    """Reads all images into memory, as bytes.

    The folder holds ``train`` and ``test`` (or ``val``), each with a sub-folder per class. If it holds the classes
    themselves, a fifth of each class is set aside for testing. Files without an image's ending are left out.

    Args:
        path: The folder.
        image_size: Side in pixels to which images are cut to a square and scaled; None if all have the same size.
        channels: 1 for grey, 3 for colour; None for grey if all images are grey.
        seed: The seed of the choice of the test images.

    Raises:
        DataError: A class has no images, an image cannot be read, or images have several sizes.
    """
    root = Path(path)
    if not root.is_dir():
        raise DataError(root, "there is no such folder", "Give a folder of images or an .npz file")
    parts = _parts(root)
    classes = _classes(parts)
    listed = [_listed(part, classes) for part in parts]
    if channels is None:
        channels = 1 if all(_is_grey(file) for files, _ in listed for file in files) else 3
    size: tuple[int, int] | None = None if image_size is None else (image_size, image_size)
    splits = []
    for files, labels in listed:
        split, size = _read(files, labels, size, channels, resize=image_size is not None)
        splits.append(split)
    loaded = Dataset(root.name, tuple(classes), splits[0], splits[-1])
    if len(splits) > 1:
        return loaded
    held = loaded.hold_out(max(1, round(TEST_SHARE * len(loaded.train))), seed)
    assert held.valid is not None
    return replace(held, test=held.valid, valid=None)


def _parts(root: Path) -> list[Path]:
    """Returns the training and the test folder, or the one folder for both."""
    train = root / "train"
    if not train.is_dir():
        return [root]
    for name in _TEST_NAMES:
        if (root / name).is_dir():
            return [train, root / name]
    raise DataError(root, "it has a train folder but no test folder", "Add one, or give the train folder itself")


def _classes(parts: Sequence[Path]) -> list[str]:
    names = [sorted(entry.name for entry in part.iterdir() if _is_class(entry)) for part in parts]
    if len(names[0]) < 2:
        found = ", ".join(names[0]) or "none"
        raise DataError(
            parts[0], f"it needs a sub-folder of images for each class, two at least; it has {found}", "Sort them so"
        )
    for part, other in zip(parts[1:], names[1:], strict=True):
        if other != names[0]:
            odd = ", ".join(sorted(set(other) ^ set(names[0]))[:8])
            raise DataError(part, f"its classes are not those of {parts[0]}: {odd}", "Give both the same sub-folders")
    return names[0]


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith((".", "__"))


def _listed(part: Path, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (part / name).rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not found:
            endings = " ".join(SUFFIXES)
            raise DataError(part / name, f"it holds no image ({endings})", "Add images, or remove the folder")
        files += found
        labels += [label] * len(found)
    return files, labels


def _is_grey(file: Path) -> bool:
    with _opened(file) as image:
        return image.mode in _GREY


def _read(
    files: Sequence[Path], labels: Sequence[int], size: tuple[int, int] | None, channels: Channels, resize: bool
) -> tuple[Split, tuple[int, int]]:
    """Reads the images, all of one size (width, height), which is the first image's if none is given."""
    first = _pixels(files[0], None, channels) if size is None else None
    if first is not None:
        size = (first.shape[2], first.shape[1])
    assert size is not None
    images = np.empty((len(files), channels, size[1], size[0]), np.uint8)
    for number, file in enumerate(files):
        pixels = _pixels(file, size if resize else None, channels)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                file,
                f"it has {pixels.shape[2]}×{pixels.shape[1]} pixels, others have {size[0]}×{size[1]}",
                f"Scale all to one size with --image-size, for example --image-size {max(size)}",
            )
        images[number] = pixels
    return Split(torch.from_numpy(images), torch.tensor(labels)), size


def _pixels(file: Path, size: tuple[int, int] | None, channels: Channels) -> npt.NDArray[np.uint8]:
    """Reads the pixels of one image, (C, H, W)."""
    from PIL import ImageOps

    with _opened(file) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "I;16":  # Pillow would clip it at 255
            upright = upright.point(lambda value: value / 256).convert("L")
        upright = upright.convert("L" if channels == 1 else "RGB")
        if size is not None:
            upright = ImageOps.fit(upright, size)
        pixels = np.asarray(upright, np.uint8)
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Image]:
    """Opens an image, which the block decodes; refuses one with more pixels than Pillow's limit."""
    try:
        from PIL import Image
    except ImportError as error:
        remedy = 'Install it with `pip install "rlsprune[cli]"`'
        raise DataError(file, "images are read by Pillow, which is not installed", remedy) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(file, str(error), "Scale it down, or leave it out") from error
    except DataError:
        raise
    except Exception as error:  # damaged files make readers raise any error
        raise DataError(file, f"it is not a whole image ({error})", "Replace or remove it") from error
