"""Runs in processes of their own."""

import sys
from pathlib import Path

import pytest

from rlsprune.app.experiments.jobs import start


@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of a process from /proc")
def test_a_run_keeps_freed_memory_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    with (tmp_path / "log.txt").open("wb") as output, start(tmp_path, output) as process:
        told: list[str] = []
        while len(told) < 2 and process.poll() is None:  # it is empty until the program has started
            told = Path(f"/proc/{process.pid}/environ").read_text(encoding="utf-8").split("\0")
    assert "MALLOC_TRIM_THRESHOLD_=1000" in told
    assert "MALLOC_MMAP_THRESHOLD_=4294967296" in told
    assert process.returncode, "there is no run in the folder"
