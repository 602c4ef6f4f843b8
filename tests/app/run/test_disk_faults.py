"""A full disk, a read-only folder, a failing disk, a clock that jumps: one clear line, and nothing is lost."""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.run.tiny import leftovers, numbers, tiny_recipe
from disk import Disk
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer
from rlsprune.io.atomic import StorageError
from rlsprune.io.lock import InUseError

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = RunFolder(tmp_path_factory.mktemp("whole"))
    train_and_prune(tiny_recipe(), folder)
    return numbers(folder)


REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EIO: "check the disk",
}


@pytest.mark.parametrize("code", REMEDIES, ids=errno.errorcode.get)
@pytest.mark.parametrize("number", [0, 40, 80])
def test_disk_fails_from_some_operation_on(tmp_path: Path, expected: object, code: int, number: int) -> None:
    folder = RunFolder(tmp_path / "run")
    disk = Disk(tmp_path, number, OSError(code, os.strerror(code)))
    with disk.running(), pytest.raises(StorageError) as caught:
        train_and_prune(tiny_recipe(), folder)
    disk.close()
    message = str(caught.value)
    assert str(folder.path) in message
    assert f"({os.strerror(code)}); what was there before is intact: {REMEDIES[code]} and try again" in message
    assert "\n" not in message
    assert caught.value.errno == code
    train_and_prune(tiny_recipe(), folder)
    assert numbers(folder) == expected
    assert leftovers(folder.path) == []


# In a file system of its own, of many sizes: full at many different moments. The expected numbers come as a file.
SMALL_DISKS = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import rlsprune.app.run.execute as run
from rlsprune.io.atomic import StorageError
from rlsprune.app.run.folder import RunFolder
from app.run.tiny import leftovers, numbers, tiny_recipe

run.latencies = lambda calls: [[1.0] * 5 for _ in calls]
disk = Path({disk!r})
options = lambda text: subprocess.run(["mount", "-o", text, "tmpfs", str(disk)], check=True)

def fails(remedy):
    try:
        run.train_and_prune(tiny_recipe(), folder)
    except StorageError as error:
        assert remedy in str(error), error
        assert len(str(error).splitlines()) == 1
        return True
    return False

whole = RunFolder({whole!r})
run.train_and_prune(tiny_recipe(), whole)
full = 0
for size in {sizes!r}:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={{size}}k", "tmpfs", str(disk)], check=True)
    folder = RunFolder(disk / "run")
    full += fails("free some space")
    options("remount,ro")
    assert folder.finished or fails("make the folder writable")
    options("remount,rw,size=16m")
    run.train_and_prune(tiny_recipe(), folder)
    assert numbers(folder) == numbers(whole), size
    assert leftovers(folder.path) == []
    subprocess.run(["umount", str(disk)], check=True)
print("full", full)
"""


def may_mount() -> bool:
    tool = shutil.which("unshare")
    command = [tool or "", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return tool is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "sizes", [(40,), pytest.param(tuple(range(4, 84, 4)), marks=[pytest.mark.slow, pytest.mark.soak])], ids=len
)
def test_small_disks_fill_up_and_the_run_goes_on_once_there_is_space(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    if not may_mount():
        pytest.skip("this user may not mount a small disk")
    (tmp_path / "disk").mkdir()
    tests = str(Path(__file__).parents[2])
    script = SMALL_DISKS.format(tests=tests, disk=str(tmp_path / "disk"), whole=str(tmp_path / "whole"), sizes=sizes)
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"full {len(sizes)}\n"


class StopAfter(Observer):
    """Ctrl-C once so many epochs are done."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        if metrics["epoch"] == self.epochs:
            raise KeyboardInterrupt


def test_clock_that_jumps_changes_nothing(tmp_path: Path, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(jumps) * 1e9 + 1e9)  # 1970, 2033, 1970, …
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_and_prune(tiny_recipe(), folder, StopAfter(2))
    older, newer = sorted((tmp_path / "checkpoint").iterdir())
    os.utime(older, (4e9, 4e9))
    os.utime(newer, (1, 1))
    train_and_prune(tiny_recipe(), folder)
    assert numbers(folder) == expected


def test_second_run_in_a_folder_is_refused_and_does_no_harm(tmp_path: Path, expected: object) -> None:
    folder = RunFolder(tmp_path)

    class Second(Observer):
        refused = 0

        def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
            with pytest.raises(InUseError, match=f"{tmp_path} is in use by process {os.getpid()}"):
                train_and_prune(tiny_recipe(), folder)
            self.refused += 1

    second = Second()
    train_and_prune(tiny_recipe(), folder, second)
    assert second.refused == 3
    assert numbers(folder) == expected


def test_checkpoint_that_does_not_fit_the_run_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_and_prune(tiny_recipe(), folder, StopAfter(1))
    state = (tmp_path / "checkpoint" / "epoch-000001").rename(tmp_path / "checkpoint" / "spare")
    recipe = tiny_recipe()
    folder.save_checkpoint(1, recipe.build_model(), {"optimizer": {"state": 7}})
    with pytest.raises(ValueError, match="does not fit this run"):
        train_and_prune(recipe, folder)
    assert state.exists()
