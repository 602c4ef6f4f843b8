"""Two processes on one folder: the second is told who holds it; a dead holder holds nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError
from rlsprune.io.lock import InUseError, exclusive

HOLDER = """
import sys, time
from pathlib import Path
from rlsprune.io.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with (
                pytest.raises(InUseError, match=rf"{tmp_path} is in use by process {holder.pid} on .*: wait"),
                RunFolder(tmp_path).locked(),
            ):
                pass
        finally:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
    assert f"process {holder.pid} " in lock.read_text(), "it left its file behind"
    with RunFolder(tmp_path).locked():
        assert f"process {os.getpid()} " in lock.read_text()


def test_the_same_process_is_refused_too_and_the_lock_ends_with_an_error(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"

    def fail() -> None:
        with exclusive(lock):
            with pytest.raises(InUseError), exclusive(lock):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with exclusive(lock):
        pass


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_refused_by_name_and_a_link_is_not_followed(tmp_path: Path, kind: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("precious")
    lock = run / ".lock"
    {"link": lambda: lock.symlink_to(outside), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}[kind]()
    with pytest.raises(FileError, match=r"\.lock.*not a regular file.*remove it"), exclusive(lock):
        pass
    assert outside.read_text() == "precious"
