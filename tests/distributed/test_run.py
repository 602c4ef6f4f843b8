"""``torchrun -m rlsprune run``: the run of one process, by several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed.runs import OPTIONS, agree

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def command(ranks: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "rlsprune", *arguments]


def run(ranks: int, *arguments: str) -> None:
    done = subprocess.run(
        command(ranks, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_which_another_number_of_ranks_finishes(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    # Every batch divides by 2 and by 3: with unequal shares the rows that a prune looks at are others.
    options = [*OPTIONS, "--batch-size", "60", "--epochs", "6"]
    run(1, *options, "--out", str(one))
    process = subprocess.Popen(
        command(3, *options, "--out", str(many)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not (many / "checkpoint" / "epoch-000002").exists():
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
    agree(many, one, tolerance=1e-3)
