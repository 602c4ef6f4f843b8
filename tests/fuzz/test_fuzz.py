"""Damaged and hostile files: each is loaded or refused with one of our errors; no crash, no hang, no other traceback.

`RLSPRUNE_FUZZ` sets how many files each loader is given; `make soak` gives 1,300 to each of the seventeen.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.targets import make_targets

FILES = int(os.environ.get("RLSPRUNE_FUZZ", "25"))
SECONDS = 20  # for one file; they take milliseconds
SPARE_BYTES = 2 << 30  # that loading a file of a few kilobytes may take beyond what the process has

NAMES = (
    "model",
    "model, signed",
    "metadata",
    "state",
    "state, signed",
    "weights .pt",
    "weights .safetensors",
    "idx",
    "idx pair",
    "cifar .bin",
    "cifar .tar.gz",
    "svhn .mat",
    "npz",
    "config",
    "fit config",
    "metrics",
    "report",
)


def folder_of(name: str) -> str:
    """The name of a loader, for a folder."""
    return name.replace(",", "").replace(".", "").replace(" ", "-")


def corpus_of(name: str) -> list[Path]:
    """Inputs that coverage-guided fuzzing (guided.py) found to reach other code; see `Target.core`."""
    return sorted((Path(__file__).parent / "corpus" / folder_of(name)).glob("*"))


class HangError(BaseException):
    """A loader that does not come back."""


@contextmanager
def bounded() -> Iterator[None]:
    """Limits on time and memory."""

    def hang(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, hang)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_loaded_or_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = make_targets(tmp_path)
    assert tuple(targets) == NAMES
    target, outcomes = targets[name], Counter[str]()

    @settings(
        max_examples=FILES,
        database=None,
        derandomize="RLSPRUNE_FUZZ" not in os.environ,
        phases=(Phase.generate,),  # a seed cannot be made simpler
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**63))
    def run(seed: int) -> None:
        folder = tmp_path / "scratch"
        folder.mkdir()
        try:
            (folder / "file").write_bytes(target.files(random.Random(seed)))
            with bounded():
                target.load(folder / "file")
            outcomes["loaded"] += 1
        except target.refusals:
            outcomes["refused"] += 1
        finally:
            shutil.rmtree(folder)

    run()
    assert outcomes["refused"]
    if "RLSPRUNE_FUZZ" in os.environ:
        with capsys.disabled():
            sys.stdout.write(
                f"\n{name}: {outcomes.total():,} files, {outcomes['refused']:,} refused, the rest loaded\n"
            )


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_reach_other_code_are_loaded_or_refused(name: str, tmp_path: Path) -> None:
    target = make_targets(tmp_path)[name]
    for number, path in enumerate([*[None] * bool(target.core), *corpus_of(name)]):
        folder = tmp_path / f"scratch-{number}"
        folder.mkdir()
        (folder / "file").write_bytes(target.pack(target.core if path is None else path.read_bytes()))
        try:
            with bounded():
                target.load(folder / "file")
        except target.refusals:
            assert path is not None, "the sound file is refused"
