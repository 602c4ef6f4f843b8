"""Data sets in memory: images as bytes, labels as integers, in a training and a test split."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlsprune.app.data import catalog
from rlsprune.app.data.catalog import CIFAR_ARCHIVE, CIFAR_TEST, CIFAR_TRAIN, CatalogEntry
from rlsprune.app.data.digits import read_digits
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.formats import Images, Labels, read_cifar_archive, read_cifar_batch, read_idx_pair
from rlsprune.app.data.matlab import read_svhn
from rlsprune.app.data.streams import md5_of


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels."""

    images: Tensor
    """uint8, (N, C, H, W); a user's own data may also be floating point, and of any shape (N, …)"""
    labels: Tensor
    """int64, (N,): numbers of classes; a user's own data may also have floating-point targets or labels (N, outputs)"""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Split:
        """Returns the same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))

    def select(self, indices: Tensor) -> Split:
        """Selects the images at these indices, in the order of the indices."""
        indices = indices.to(self.labels.device)
        return Split(self.images.index_select(0, indices), self.labels.index_select(0, indices))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    Examples:
        >>> from rlsprune.app.data import load
        >>> data = load("digits")
        >>> len(data.train), len(data.test), tuple(data.train.images.shape[1:])
        (4000, 1000, (1, 28, 28))
        >>> data = data.take(2000).hold_out(500)
        >>> len(data.train), len(data.valid)
        (1500, 500)
    """

    name: str
    classes: tuple[str, ...]
    """The names of the classes, labels or targets, one for each output of the network."""
    train: Split
    test: Split
    valid: Split | None = None
    """Images taken out of the training split by `hold_out`."""
    task: str = "classification"
    """One of "classification", "regression" and "multi-label"."""
    columns: tuple[str, ...] = ()
    """The names of a table's columns, if they are known."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one input: channels, height and width of an image."""
        return tuple(self.train.images.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Returns the same data set on another device."""
        return self.each(lambda split: split.to(device))

    def each(self, change: Callable[[Split], Split]) -> Dataset:
        """Applies a change to every split, in a copy of the data set."""
        valid = None if self.valid is None else change(self.valid)
        return replace(self, train=change(self.train), test=change(self.test), valid=valid)

    def hold_out(self, count: int, seed: int = 0) -> Dataset:
        """Moves images from the training to the validation split, each class in proportion.

        Args:
            count: the number of images, at least 1 and fewer than the training images.
            seed: the seed of the choice, which is the same on every device.

        Returns:
            A data set with `valid`; the images that stay keep their order.
        """
        _check_count("hold_out", count, len(self.train) - 1)
        if self.valid is not None:
            raise ValueError(f"hold_out: {self.name} already has {len(self.valid)} validation images")
        chosen = stratified_choice(self.train.labels, count, seed)
        stays = torch.ones(len(self.train), dtype=torch.bool)
        stays[chosen] = False
        return replace(self, train=self.train.select(stays.nonzero()[:, 0]), valid=self.train.select(chosen))

    def reunite(self) -> Dataset:
        """Gives the validation images back to the training split, behind the others."""
        if self.valid is None:
            return self
        images, labels = (
            torch.cat([getattr(self.train, part), getattr(self.valid, part)]) for part in ("images", "labels")
        )
        return replace(self, train=Split(images, labels), valid=None)

    def take(self, count: int, seed: int | None = 0) -> Dataset:
        """Keeps some of the training images; test and validation images stay.

        Args:
            count: the number of images, at least 1 and at most all.
            seed: the seed of a choice that takes each class in proportion; None for the first `count` images.

        Returns:
            A data set whose training images are in their former order.
        """
        _check_count("take", count, len(self.train))
        indices = torch.arange(count) if seed is None else stratified_choice(self.train.labels, count, seed)
        return replace(self, train=self.train.select(indices))


def load(name: str, data_dir: str | os.PathLike[str] | None = None, verify: bool = True) -> Dataset:
    """Loads a data set into memory. Never downloads: see `get`.

    Args:
        name: "digits" (embedded), "mnist", "fashion-mnist", "cifar10" or "svhn".
        data_dir: the folder of its files; None for `RLSPRUNE_DATA`, then the user's cache folder.
        verify: whether to check the files' MD5 against the published ones (MNIST: 0.1 s, SVHN: 0.5 s).

    Raises:
        DataError: the data set is unknown, or its files are missing, damaged or not the published ones. The message
            says what to do.
    """
    dataset = catalog.entry(name)
    if not dataset.layouts:
        train, test = read_digits()
    else:
        layout, found = catalog.locate(dataset, data_dir)
        if verify:
            for part, path in found.items():
                _verify(dataset, path, layout[part].md5s)
        train, test = _read(dataset, found)
    return Dataset(name, dataset.classes, _split(*train), _split(*test))


def stratified_choice(labels: Tensor, count: int, seed: int) -> Tensor:
    """Draws sorted indices of `count` images, each class in proportion (largest remainders get the rest).

    They are drawn on the CPU, so that they do not depend on the labels' device. Floating-point targets count as one
    class.
    """
    labels = labels.cpu() if not labels.is_floating_point() else torch.zeros(len(labels), dtype=torch.long)
    sizes = torch.bincount(labels)
    exact = sizes * count  # in units of 1/len(labels), so that nothing is rounded
    quota = exact // len(labels)
    order = torch.argsort(exact % len(labels), descending=True, stable=True)
    quota[order[: count - int(quota.sum())]] += 1
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    members = (shuffled[labels[shuffled] == label][:share] for label, share in enumerate(quota.tolist()))
    return torch.cat(list(members)).sort().values


def _check_count(method: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"{method}: the number of images must be between 1 and {most}, not {count}")


def _verify(dataset: CatalogEntry, path: Path, md5s: tuple[str, ...]) -> None:
    actual = md5_of(path)
    if actual not in md5s:
        raise DataError(
            path,
            f"its MD5 is {actual}, but that of the published file is {' or '.join(md5s)}",
            f"Delete it and run `rlsprune data get {dataset.name}`, or read it as it is with --no-verify",
        )


def _read(dataset: CatalogEntry, paths: dict[str, Path]) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    if dataset.name == "svhn":
        return read_svhn(paths["train"]), read_svhn(paths["test"])
    if dataset.name == "cifar10":
        if CIFAR_ARCHIVE in paths:
            batches = read_cifar_archive(paths[CIFAR_ARCHIVE], (*CIFAR_TRAIN, CIFAR_TEST))
        else:
            batches = {part: read_cifar_batch(path) for part, path in paths.items()}
        images, labels = zip(*(batches[part] for part in CIFAR_TRAIN), strict=True)
        return (np.concatenate(images), np.concatenate(labels)), batches[CIFAR_TEST]
    classes = len(dataset.classes)
    return (
        read_idx_pair(paths["train-images-idx3"], paths["train-labels-idx1"], classes),
        read_idx_pair(paths["t10k-images-idx3"], paths["t10k-labels-idx1"], classes),
    )


def _split(images: Images, labels: Labels) -> Split:
    return Split(torch.from_numpy(images), torch.from_numpy(labels))
