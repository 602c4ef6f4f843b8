"""A page that is watched follows its run and comes to rest when that ends."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsprune.app.report.watch import watch
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within half a minute")


def test_page_follows_the_run_to_its_end(runs: dict[str, Path], unfinished: Path, tmp_path: Path) -> None:
    page, folder, whole = tmp_path / "page.html", RunFolder(unfinished), RunFolder(runs["rls"])
    watching = threading.Thread(target=watch, args=([unfinished], page, 0.05))
    watching.start()
    wait_for(lambda: page.is_file() and "epoch 2 of 4" in page.read_text())
    assert 'data-reload="1"' in page.read_text()
    folder.write_lines("metrics", whole.read_lines("metrics")[:3])
    wait_for(lambda: "epoch 3 of 4" in page.read_text())
    folder.write_lines("metrics", whole.read_lines("metrics"))
    folder.write_json("summary", whole.read_json("summary"))
    watching.join(timeout=30)
    assert not watching.is_alive()
    assert "data-reload" not in page.read_text()
    assert "In progress" not in page.read_text()


def test_ctrl_c_ends_it_and_the_page_comes_to_rest(unfinished: Path) -> None:
    page = unfinished / "report.html"
    command = [sys.executable, "-m", "rlsprune", "report", str(unfinished), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: page.is_file() and "data-reload" in page.read_text())
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""
    assert "No longer watching" in said
    assert "data-reload" not in page.read_text()
    assert "epoch 2 of 4" in page.read_text()


def test_damage_ends_it(unfinished: Path, tmp_path: Path) -> None:
    (unfinished / "metrics.jsonl").write_text("{")
    with pytest.raises(FileError, match=r"metrics\.jsonl"):
        watch([unfinished], tmp_path / "page.html", 0.05)
