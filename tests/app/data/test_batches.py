"""Batches: every image once, the pixels it had, and the same ones again from the same state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsprune.app.data import Batches
from rlsprune.app.data.batches import shifted


def numbered(count: int, size: int = 5) -> tuple[Tensor, Tensor]:
    """Images that carry their index in every pixel; the labels too."""
    index = torch.arange(count)
    return index.to(torch.uint8)[:, None, None, None].expand(-1, 2, size, size).contiguous(), index


def random(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, 8, 8), generator=generator).to(torch.uint8), torch.arange(count)


def epoch(batches: Batches) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


@given(st.integers(1, 60), st.integers(1, 70), st.booleans(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_every_image_once(count: int, batch_size: int, shuffle: bool, seed: int) -> None:
    batches = Batches(*numbered(count), batch_size, seed=seed, shuffle=shuffle)
    sizes = [len(labels) for _, labels in batches]
    assert len(sizes) == len(batches)
    assert set(sizes[:-1]) <= {batch_size}
    images, labels = epoch(batches)
    assert sorted(labels.tolist()) == list(range(count))
    assert images.dtype == torch.float32
    expected = labels.float()[:, None, None, None].expand_as(images) / 255
    assert torch.equal(images, expected)
    if not shuffle:
        assert labels.tolist() == list(range(count))


def test_pixels_go_from_zero_to_one() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8)[:, None, None, None]
    batch, _ = next(iter(Batches(images, torch.arange(3), 3, shuffle=False)))
    assert batch.flatten().tolist() == [0.0, pytest.approx(0.2), 1.0]


def test_the_source_is_not_changed() -> None:
    images, labels = random(10)
    before = images.clone()
    for batch, _ in Batches(images, labels, 4, shuffle=False, augment="crop+flip"):
        batch.zero_()
    assert torch.equal(images, before)


def test_drop_last() -> None:
    batches = Batches(*numbered(10), 4, drop_last=True)
    assert [len(labels) for _, labels in batches] == [4, 4]
    assert len(batches) == 2


def test_an_epoch_of_fewer_images_takes_others_each_time() -> None:
    batches = Batches(*numbered(50), 8, images_per_epoch=20)
    epochs = [epoch(batches)[1].tolist() for _ in range(2)]
    assert [len(set(labels)) for labels in epochs] == [20, 20]
    assert set(epochs[0]) != set(epochs[1])
    assert len(batches) == 3


def test_epochs_differ_and_seeds_repeat_them() -> None:
    first, second = (Batches(*numbered(50), 7, seed=5) for _ in range(2))
    orders = [epoch(first)[1].tolist() for _ in range(3)]
    assert orders == [epoch(second)[1].tolist() for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != epoch(Batches(*numbered(50), 7, seed=6))[1].tolist()


@pytest.mark.parametrize("augment", [None, "crop", "crop+flip"])
def test_state_is_saved_and_restored(augment: Any) -> None:
    batches = Batches(*random(20), 6, seed=1, augment=augment)
    epoch(batches)
    file = io.BytesIO()
    torch.save(batches.state_dict(), file)
    expected = [epoch(batches) for _ in range(2)]
    file.seek(0)
    resumed = Batches(*random(20), 6, seed=99, augment=augment)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for images, labels in expected:
        again = epoch(resumed)
        assert torch.equal(again[0], images)
        assert torch.equal(again[1], labels)


def test_an_epoch_left_early_does_not_change_the_next() -> None:
    left, whole = (Batches(*random(20), 6, seed=1, augment="crop+flip") for _ in range(2))
    next(iter(left))
    epoch(whole)
    assert torch.equal(epoch(left)[0], epoch(whole)[0])


def test_a_shared_generator_is_used() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    assert torch.equal(epoch(Batches(*numbered(30), 8, generator=generator))[1], expected)


def test_shifted_against_a_slow_crop() -> None:
    images, _ = random(81)
    grid = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    result = shifted(images, grid[:, 0], grid[:, 1], 4)
    for image, (down, right), got in zip(images, grid.tolist(), result, strict=True):
        padded = torch.zeros(3, 16, 16, dtype=torch.uint8)
        padded[:, 4:12, 4:12] = image
        assert torch.equal(got, padded[:, down : down + 8, right : right + 8])


@pytest.mark.parametrize(
    ("augment", "margin", "flips"), [("crop", 4, False), ("crop+flip", 4, True), ("crop1", 1, False)]
)
def test_augmented_images_are_windows_of_the_original(augment: str, margin: int, flips: bool) -> None:
    images, labels = random(300)
    side, seen = 2 * margin + 1, set()
    augmented, _ = epoch(Batches(images, labels, 64, shuffle=False, augment=augment))
    for got, original in zip(augmented, images, strict=True):
        pixels = (got * 255).round().to(torch.uint8)
        grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        windows = shifted(original.expand(side**2, -1, -1, -1), grid[:, 0], grid[:, 1], margin)
        plain = (windows == pixels).flatten(1).all(1)
        mirrored = (windows.flip(-1) == pixels).flatten(1).all(1)
        assert plain.any() or mirrored.any()
        seen.add((bool(mirrored.any()), int((plain | mirrored).nonzero()[0])))
    assert {mirrored for mirrored, _ in seen} == ({False, True} if flips else {False})
    assert len({window for _, window in seen}) > 0.7 * side**2, "nearly all shifts occur among 300 images"


def test_channels_last() -> None:
    plain, last = (Batches(*random(8), 4, augment="crop", channels_last=value) for value in (False, True))
    for (a, _), (b, _) in zip(plain, last, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
        assert b.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        (torch.zeros(4, 1, 2, 2, dtype=torch.int64), torch.zeros(4), {}, "uint8 or floating.*not torch.int64"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4), {}, r"not torch.uint8 of \(4,\)"),
        (torch.zeros(4, 2), torch.zeros(4), {"augment": "crop"}, r"not \(4, 2\)"),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(3), {}, r"shape \(4,\).*not \(3,\)"),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, device="meta"), {}, "labels on meta"),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), {"batch_size": 0}, "at least 1, not 0"),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), {"augment": "blur"}, "'blur' is not valid"),
        (
            torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
            torch.zeros(4),
            {"batch_size": 5, "drop_last": True},
            "4 images, batch_size 5",
        ),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), {"images_per_epoch": 5}, "5 must be in 1…4"),
    ],
)
def test_bad_arguments(images: Tensor, labels: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(images, labels, **{"batch_size": 2, **options})


def test_features_come_as_they_are_and_images_flat_on_request() -> None:
    features = torch.randn(6, 3)
    batch, _ = next(iter(Batches(features, torch.arange(6), 6, shuffle=False)))
    assert torch.equal(batch, features)
    images, labels = random(4)
    flat, _ = next(iter(Batches(images, labels, 4, shuffle=False, flat=True)))
    assert torch.equal(flat, images.reshape(4, -1) / 255)
