"""What a process that imports, trains, prunes, saves and loads does besides: nothing, and the same every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, importlib, pkgutil, sys, threading
from pathlib import Path

def no_network(event, arguments):
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        sys.stderr.write(f"network access: {{event}} {{arguments}}")
        sys.stderr.flush()
        import os
        os._exit(13)  # an exception might be caught on its way

sys.addaudithook(no_network)
sys.path.insert(0, {tests!r})
import rlsprune
for module in pkgutil.walk_packages(rlsprune.__path__, "rlsprune."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import torch
from rlsprune.app.data import load
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.execute import train_and_prune
from app.run.tiny import numbers, tiny_recipe

assert len(load("digits").train) == 4000
folder = RunFolder({folder!r})
train_and_prune(tiny_recipe(deterministic=True), folder)
assert not torch.are_deterministic_algorithms_enabled(), "the switch is put back"
rlsprune.load(folder.model, into=tiny_recipe().build_model())
assert threading.active_count() == 1, threading.enumerate()
tasks = Path("/proc/self/task")
if tasks.exists():
    assert not any((task / "children").read_text().split() for task in tasks.iterdir())
print(hashlib.sha256(repr(numbers(folder)).encode()).hexdigest())
"""


def run(folder: Path) -> str:
    script = SCRIPT.format(tests=str(Path(__file__).parents[2]), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_network_no_threads_left_and_the_same_numbers_in_two_processes(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    assert first == second
    assert len(first) == 65
