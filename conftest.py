"""Settings for all tests, the doctests of the package among them."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The tests' tensors are small: a second thread costs more than it gives, and makes runs depend on the machine.
torch.set_num_threads(1)

# A shell that starts the tests in the background makes them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ROOT = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """``--doctest-modules`` imports every file it is shown: those without an example or a test stay closed."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    if collection_path.is_relative_to(ROOT / "src") and ">>>" in collection_path.read_text(encoding="utf-8"):
        return None
    return True


@pytest.fixture(autouse=True)
def _files_of_examples_go_elsewhere(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """A run sets torch's threads; other tests have their own."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_soon_found() -> None:
    """Some tests collect garbage dozens of times, each time among all that was imported, which stays anyway."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[None]:
    """Neither how long a network takes nor the real disk is of interest, and they take most of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr("rlsprune.app.run.summary.latencies", lambda calls: [[1.0] * 5 for _ in calls])
        yield
