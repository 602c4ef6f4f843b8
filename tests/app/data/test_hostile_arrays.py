""".npz files from strangers: claims are checked before memory is taken, bombs are not unpacked, nothing is executed."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsprune.app.data.arrays import KEYS, read_npz
from rlsprune.app.data.errors import DataError


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(text: str, body: bytes = b"") -> bytes:
    content = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content + body


def archive(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    good = {"x_train": np.zeros((6, 4)), "x_test": np.zeros((6, 4)), "y_train": np.arange(6), "y_test": np.arange(6)}
    with zipfile.ZipFile(path, "w", method) as file:
        for key in KEYS:
            file.writestr(f"{key}.npy", members.get(key, npy(good[key])))
        file.writestr("../../evil.npy", b"not looked at")
    return path


def test_sound_arrays_in_every_order_and_method_are_read(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(6, 4)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        for array in (values, np.asfortranarray(values), values.astype(">f4")):
            data = read_npz(archive(tmp_path / "a.npz", method, x_train=npy(array)))
            np.testing.assert_array_equal(data.train.images.numpy(), values.astype(np.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


CLAIM = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }"
HOSTILE = {
    "terabytes claimed": (header(CLAIM % "500000000000, 2"), "not have the size of its shape"),
    "numbers without end": (header(CLAIM % ("9" * 60 + ", 2")), "not have the size|cannot be read"),
    "negative": (header(CLAIM % "-6, -4", bytes(192)), "not have the size|cannot be read"),
    "items of no size": (header("{'descr': '|V0', 'fortran_order': False, 'shape': (99999999999, 2), }"), "holds"),
    "pickled code": (npy(np.array([Evil()] * 6, dtype=object)), "holds object"),
    "pickled code alone": (pickle.dumps(Evil()), "cannot be read"),
    "a record type": (npy(np.zeros(6, dtype=[("a", "f8"), ("b", "f8")])), "holds"),
    "code for a header": (header("__import__('os').abort()"), "cannot be read"),
    "deep header": (header("[" * 110), "cannot be read"),
    "another version": (b"\x93NUMPY\x07\x00" + bytes(40), "version"),
    "nothing": (b"", "cannot be read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays_are_refused_in_little_memory(tmp_path: Path, case: str) -> None:
    content, said = HOSTILE[case]
    path = archive(tmp_path / "a.npz", x_train=content)
    tracemalloc.start()
    with pytest.raises(DataError, match=said) as caught:
        read_npz(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert str(path) in str(caught.value)


def test_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    size = 600 << 20
    shape = f"{size // 8 // 4}, 4"
    path = tmp_path / "bomb.npz"
    good = npy(np.arange(6))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for key in KEYS[1:]:
            file.writestr(f"{key}.npy", good)
        with file.open("x_train.npy", "w") as member:
            member.write(header(CLAIM % shape))
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="would unpack to 629,"):
        read_npz(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_member_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", x_train=npy(np.zeros((6, 4))) + bytes(8))
    with pytest.raises(DataError, match="not have the size of its shape"):
        read_npz(path)


@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800])
def test_names_outside_unicode_are_refused(tmp_path: Path, code: int) -> None:
    names = np.array(list("ababab"))
    names.view(np.uint32)[3] = code
    with pytest.raises(DataError, match="names that are not text"):
        read_npz(archive(tmp_path / "a.npz", y_train=npy(names)))
