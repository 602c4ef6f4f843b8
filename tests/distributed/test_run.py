"""``torchrun -m rlsprune run``: the run of one process, by several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distributed import launch
from rlsprune.cli import main

OPTIONS = ["run", "digits-fnn", "--train-images", "600", "--test-images", "200", "--warmup-epochs", "1", "--quiet"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def command(ranks: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "rlsprune", *arguments]


def run(ranks: int, *arguments: str) -> None:
    done = subprocess.run(
        command(ranks, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def agree(folder: Path, other: Path) -> None:
    assert [e["layers"] for e in lines(folder, "events.jsonl")] == [e["layers"] for e in lines(other, "events.jsonl")]
    for mine, theirs in zip(lines(folder, "metrics.jsonl"), lines(other, "metrics.jsonl"), strict=True):
        for name in ("train_loss", "gate_loss", "test_loss", "weights_percent"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4), (mine["epoch"], name)


def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*OPTIONS, "--epochs", "3", "--threads", "1"]
    processes = launch.start_command(2, "rlsprune", *options, "--out", str(two))
    assert main([*options, "--out", str(one)]) == 0
    launch.finish(processes)
    assert lines(two, "events.jsonl")
    agree(two, one)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_which_another_number_of_ranks_finishes(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    run(1, *OPTIONS, "--epochs", "12", "--out", str(one))
    process = subprocess.Popen(
        command(3, *OPTIONS, "--epochs", "12", "--out", str(many)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not (many / "checkpoint" / "epoch-000003").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(ranks[-1], signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode != 0
        assert not (many / "summary.json").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    run(2, "run", "--resume", str(many), "--quiet")
    agree(many, one)
