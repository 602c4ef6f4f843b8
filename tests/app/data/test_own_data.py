"""A user's own data: what the readers give back, and what they say about what they cannot read."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from rlsprune.app.data import DataError
from rlsprune.app.data.arrays import read_npz
from rlsprune.app.data.folders import read_image_folder

GOOD: dict[str, Any] = {
    "x_train": np.zeros((6, 2), np.float32),
    "y_train": np.array([0, 1, 2, 0, 1, 2]),
    "x_test": np.ones((3, 2), np.float32),
    "y_test": np.array([0, 1, 2]),
}


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, **{key: value for key, value in {**GOOD, **changes}.items() if value is not None})
    return path


def test_npz_of_features(tmp_path: Path) -> None:
    data = read_npz(written(tmp_path))
    assert (data.name, data.classes, data.shape) == ("data", ("0", "1", "2"), (2,))
    assert data.train.images.dtype == torch.float32
    assert torch.equal(data.test.images, torch.ones(3, 2))
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_npz_of_grey_bytes_and_names(tmp_path: Path) -> None:
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2)
    names = np.array(["b", "a", "c", "a", "b", "c"])
    data = read_npz(written(tmp_path, x_train=images, x_test=images[:3], y_train=names, y_test=names[:3]))
    assert data.train.images.dtype == torch.uint8
    assert torch.equal(data.train.images[:, 0], torch.from_numpy(images))
    assert data.classes == ("a", "b", "c")
    assert data.train.labels.tolist() == [1, 0, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y_test": None}, "it has no y_test; it has 'x_train', 'y_train', 'x_test'"),
        ({"x_train": np.zeros((5, 2), np.float32)}, "x_train has 5 entries and y_train 6"),
        ({"x_test": np.zeros((3, 4), np.float32)}, r"float32 of \(6, 2\) and x_test float32 of \(3, 4\)"),
        ({"x_train": np.full((6, 2), np.nan)}, "x_train holds a NaN"),
        ({"x_train": np.zeros(6)}, r"x_train is float64 of shape \(6,\)"),
        ({"x_train": np.zeros((6, 8, 8, 3), np.uint8)}, r"x_train.transpose\(0, 3, 1, 2\)"),
        ({"y_train": np.eye(3)[[0, 1, 2, 0, 1, 2]]}, r"numpy.argmax\(y_train, axis=1\)"),
        ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "y_train holds -1"),
        ({"y_train": np.array([0, 1, 900, 0, 1, 2])}, "its highest label is 900"),
        ({"y_train": np.array(list("abcabc"))}, "holds names and the other numbers"),
        ({"x_train": np.array([object()] * 6)}, "holds object"),
    ],
)
def test_npz_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_npz(written(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"anything"])
def test_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.npz.*cannot be read"):
        read_npz(path)
    with pytest.raises(DataError, match="no such file"):
        read_npz(tmp_path / "none.npz")


def save(path: Path, pixels: Any, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images each of two classes, which carry their number in every pixel."""
    for label, name in enumerate("ab"):
        for number in range(5):
            save(tmp_path / name / f"{number}.png", np.full((4, 6), 10 * label + number))
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    return tmp_path


def test_folder_is_split_and_every_image_is_in_one_part(photos: Path) -> None:
    data = read_image_folder(photos)
    assert data.classes == ("a", "b")
    assert data.shape == (1, 4, 6)
    numbers = [*data.train.images[:, 0, 0, 0].tolist(), *data.test.images[:, 0, 0, 0].tolist()]
    assert sorted(numbers) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert len(data.test) == 2
    for split in (data.train, data.test):
        assert split.labels.tolist() == (split.images[:, 0, 0, 0] // 10).tolist()
    assert torch.equal(read_image_folder(photos).test.images, data.test.images)
    others = [read_image_folder(photos, seed=seed).test.images for seed in range(1, 6)]
    assert any(not torch.equal(images, data.test.images) for images in others)


def test_own_split_size_and_colour_are_taken(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a" / "x.png", np.zeros((4, 8, 3)))
    save(tmp_path / "train" / "b" / "x.png", np.full((9, 9, 3), 200))
    save(tmp_path / "val" / "a" / "x.png", np.zeros((4, 4)))
    save(tmp_path / "val" / "b" / "x.jpg", np.full((16, 4), 200))
    data = read_image_folder(tmp_path, image_size=5)
    assert tuple(data.train.images.shape) == tuple(data.test.images.shape) == (2, 3, 5, 5)
    assert data.test.images[1].float().mean() == pytest.approx(200, abs=2)
    assert read_image_folder(tmp_path, image_size=5, channels=1).shape == (1, 5, 5)


def test_sideways_photo_is_turned_upright(tmp_path: Path) -> None:
    wide = np.zeros((2, 4), np.uint8)
    wide[:, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    save(tmp_path / "a" / "x.png", wide, exif=exif)
    save(tmp_path / "b" / "x.png", np.zeros((4, 2)))
    save(tmp_path / "a" / "y.png", wide, exif=exif)
    save(tmp_path / "b" / "y.png", np.zeros((4, 2)))
    data = read_image_folder(tmp_path)
    turned = torch.cat([data.train.images, data.test.images])[torch.cat([data.train.labels, data.test.labels]) == 0]
    assert tuple(turned.shape) == (2, 1, 4, 2)
    assert turned[0, 0].tolist() == [[255, 255], [0, 0], [0, 0], [0, 0]]


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is huge, and is not."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.png", b"no image at all", "not a whole image"),
        ("bad.png", b"\x89PNG\r\n\x1a\n", "not a whole image"),
        ("bad.png", png_header(4, 6), "not a whole image"),
        ("bad.jpg", b"\xff\xd8\xff\xe0\x00\x10JFIF", "not a whole image"),
        ("bomb.png", png_header(12_000, 12_000), "exceeds limit"),
        ("bomb.png", png_header(60_000, 60_000), "exceeds limit"),
    ],
)
def test_damaged_image_is_named(photos: Path, name: str, content: bytes, said: str) -> None:
    (photos / "b" / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"b/{name}.*{said}"):
        read_image_folder(photos)


def test_image_of_another_size_is_named_with_the_remedy(photos: Path) -> None:
    save(photos / "b" / "odd.png", np.zeros((7, 7)))
    with pytest.raises(DataError, match=r"b/odd\.png.*7×7 pixels, others have 6×4.*--image-size"):
        read_image_folder(photos)


def test_folders_that_hold_no_classes(photos: Path, tmp_path: Path) -> None:
    (photos / "c").mkdir()
    with pytest.raises(DataError, match=r"c'.*holds no image"):
        read_image_folder(photos)
    with pytest.raises(DataError, match="sub-folder of images for each class"):
        read_image_folder(photos / "a")
    with pytest.raises(DataError, match="no such folder"):
        read_image_folder(photos / "none")
    save(tmp_path / "split" / "train" / "a" / "x.png", np.zeros((2, 2)))
    save(tmp_path / "split" / "train" / "b" / "x.png", np.zeros((2, 2)))
    with pytest.raises(DataError, match="no test folder"):
        read_image_folder(tmp_path / "split")
    save(tmp_path / "split" / "test" / "a" / "x.png", np.zeros((2, 2)))
    with pytest.raises(DataError, match="its classes are not those"):
        read_image_folder(tmp_path / "split")


def test_a_file_that_would_start_another_program_is_refused(
    photos: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    programs = tmp_path_factory.mktemp("programs")
    ran = programs / "ran"
    program = programs / "gs"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it may have looked for the program before
    bad = next(photos.rglob("*.png")).parent / "bad.png"
    bad.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n%%EOF\n")
    with Image.open(bad) as image:
        assert image.format == "EPS", "Pillow would have taken it"
    with pytest.raises(DataError, match=r"bad\.png.*not a whole image"):
        read_image_folder(photos)
    assert not ran.exists()


def test_whatever_a_reader_raises_is_one_error_that_names_the_file(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*_: object, **__: object) -> None:
        raise OverflowError("too much")

    monkeypatch.setattr(Image, "open", overflow)
    with pytest.raises(DataError, match=r"\.png.*too much"):
        read_image_folder(photos)
