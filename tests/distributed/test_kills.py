"""Ranks that are killed at any moment: what was computed up to the last checkpoint is there, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import rlsprune
from distributed.runs import agree
from distributed.test_run import ENVIRONMENT, command

NETWORK = """
from torch import nn
def with_dropout(): return nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4))
def without(): return nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 4))
"""
EPOCHS, KILLS = 24, 20
FROZEN = dict(ENVIRONMENT)


@pytest.fixture(scope="module", autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A copy of the package that nobody edits: these tests take minutes, and every run reads the code anew."""
    folder = tmp_path_factory.mktemp("code")
    package = Path(rlsprune.__file__).parent
    shutil.copytree(package, folder / "rlsprune", ignore=shutil.ignore_patterns("__pycache__"))
    FROZEN["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network and a table of four classes, in a folder. Every batch divides by 2 and by 3."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "nets.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 20)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] * x[:, 2] > 0)
    np.savez(folder / "table.npz", x_train=x[:960], y_train=y[:960], x_test=x[960:], y_test=y[960:])
    return folder


def fit(task: Path, network: str, out: Path) -> list[str]:
    options = ["--epochs", str(EPOCHS), "--warmup-epochs", "1", "--batch-size", "60", "--gate", "train", "--quiet"]
    return ["fit", f"{task}/nets.py:{network}", "--data", f"{task}/table.npz", "--out", str(out), *options]


def results(folder: Path) -> tuple[list[dict[str, object]], list[str], bytes]:
    """What a run computed: its metrics without times, its events, its network."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]
    return metrics, (folder / "events.jsonl").read_text().splitlines(), (folder / "model.safetensors").read_bytes()


def run(ranks: int, *arguments: str) -> None:
    done = subprocess.run(
        command(ranks, *arguments), env=FROZEN, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def killed(ranks: int, arguments: list[str], out: Path, rng: random.Random, seconds: float) -> bool:
    """Kills one process of a run, the launcher or a rank, after a random time; False if the run was over by then."""
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(ranks, *arguments, "--debug"),
            env=FROZEN,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    children: list[int] = []
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(rng.uniform(0, seconds)) == 0, log.read_text()
            return False
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = [int(pid) for pid in found]
        victim = rng.choice([process.pid, *children])
        os.kill(victim, signal.SIGKILL)
        if victim == process.pid:
            end(children)  # as when a machine is gone: ranks have sessions of their own
        process.wait(120)
        return True
    finally:
        end([process.pid, *children])
        process.wait()


def end(pids: list[int]) -> None:
    """Kills them, and waits: one that is flushing a file lives on for a moment, and holds the lock of the folder."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        while _lives(pid):
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    """Whether it still runs; one that nobody has asked for its exit code does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_killed_twenty_times_lose_nothing(seed: int, task: Path, tmp_path: Path) -> None:
    whole, broken, rng = tmp_path / "whole", tmp_path / "broken", random.Random(seed)
    started = time.perf_counter()
    run(2, *fit(task, "with_dropout", whole))
    seconds, kills, done, last = time.perf_counter() - started, 0, 0, 0
    while kills < KILLS:
        resumes = (broken / "config.json").is_file()
        arguments = ["fit", "--resume", str(broken), "--quiet"] if resumes else fit(task, "with_dropout", broken)
        if not killed(2, arguments, broken, rng, seconds):
            shutil.rmtree(broken)  # it has come to its end: begin again
            done = 0
            continue
        kills += 1
        saved = sorted((broken / "checkpoint").glob("epoch-*"))
        last = int(saved[-1].name.removeprefix("epoch-")) if saved else 0
        assert last >= done, "an epoch that was saved is gone"
        done = last
    if not (broken / "config.json").is_file():
        run(2, *fit(task, "with_dropout", broken))
    else:
        run(2, "fit", "--resume", str(broken), "--quiet")
    assert results(broken) == results(whole)


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_of_three_ranks_goes_on_with_any_number(task: Path, tmp_path: Path) -> None:
    whole, broken, rng = tmp_path / "whole", tmp_path / "broken", random.Random(1)
    started = time.perf_counter()
    run(3, *fit(task, "without", whole))
    seconds = time.perf_counter() - started
    while not (saved := sorted((broken / "checkpoint").glob("epoch-*"))) or len(saved) < 2:
        shutil.rmtree(broken, ignore_errors=True)
        killed(3, fit(task, "without", broken), broken, rng, seconds)
        if (broken / "summary.json").is_file():
            shutil.rmtree(broken)
    for ranks in (1, 2, 3):
        copied = tmp_path / str(ranks)
        shutil.copytree(broken, copied)
        run(ranks, "fit", "--resume", str(copied), "--quiet")
        agree(copied, whole, tolerance=1e-3)
    assert results(tmp_path / "3") == results(whole)
