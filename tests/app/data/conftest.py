from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLSPRUNE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    """Writes bytes to one scratch file, over and over: hypothesis runs many examples in one test."""
    path = tmp_path_factory.mktemp("scratch") / "file"

    def write(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return write
