"""Executes several runs at a time, each in its own process; finished runs are skipped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.queue import PlannedRun
from rlsprune.app.run.folder import RunFolder

__all__ = ["RunFailedError", "Runner", "check_result", "check_settings", "run_all", "start"]

Done = Callable[[PlannedRun, dict[str, Any], bool], None]
"""Callback with a run, its summary, and whether it had been finished before."""
Failed = Callable[[PlannedRun, "RunFailedError"], None]
"""Callback with a run that failed, and its error."""


_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Settings of glibc that keep freed memory in the process. Otherwise every step returns large tensors to the system and
gets them back page by page, which is a sixth of the processor time of a mini-VGG's step."""


class RunFailedError(RuntimeError):
    """A run of several ended with an error."""


class Runner(Protocol):
    """An executor of runs."""

    def execute(self, run: PlannedRun) -> None:
        """Executes a run to its end, and blocks the calling thread meanwhile.

        Raises:
            RunFailedError: The run failed.
        """

    def end(self) -> None:
        """Ends all runs in progress."""


def run_all(
    runs: Sequence[PlannedRun],
    jobs: int,
    done: Done,
    runner: Runner | None = None,
    failed: Failed | None = None,
) -> None:
    """Executes all runs that are not finished yet, `jobs` at a time.

    Args:
        runs: The runs in the order in which they are started; a run may wait for an earlier one.
        jobs: Number of runs at a time.
        done: Callback for each finished run, in the order in which they end.
        runner: The executor of the runs; None for processes on this machine.
        failed: Callback for each run that failed, while the others continue; None to end with the first. A run that
            waits for one that does not finish is left out.

    Raises:
        ValueError: A folder holds a run with other settings.
        RunFailedError: A run failed, and `failed` is None. The other runs in progress are ended too; all can be
            resumed.
    """
    for run in runs:
        check_settings(run.folder, run.config)
    waiting = []
    for run in runs:
        folder = RunFolder(run.folder)
        if folder.finished:
            done(run, folder.read_summary(), True)
        else:
            waiting.append(run)
    runner = runner or _Processes()
    with _ended_by_sigterm(), ThreadPoolExecutor(jobs) as pool:
        active: dict[Future[None], PlannedRun] = {}
        try:
            while waiting or active:
                for run in [run for run in waiting if run.after is None or RunFolder(run.after).finished]:
                    if len(active) < jobs:
                        waiting.remove(run)
                        active[pool.submit(runner.execute, run)] = run
                if not active:
                    return  # the remaining runs wait for one that failed
                for future in wait(active, return_when=FIRST_COMPLETED).done:
                    run = active.pop(future)
                    try:
                        future.result()
                    except RunFailedError as error:
                        if failed is None:
                            raise
                        failed(run, error)
                        continue
                    done(run, RunFolder(run.folder).read_summary(), False)
        except BaseException:
            runner.end()
            raise


def check_settings(path: Path, config: RunConfig) -> None:
    """Checks that a folder holds no run, or the run of this config.

    Raises:
        ValueError: The folder holds a run with other settings.
    """
    folder = RunFolder(path)
    if not folder.started:
        return
    differences = config.differences(RunConfig.from_dict(folder.read_json("config")))
    if differences:
        raise ValueError(
            f"{path} holds a run with other settings (asked for: {', '.join(differences)}): "
            "give another --out, or delete that folder"
        )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM, as from a batch system, end this process like Ctrl-C within the block, after it ended its runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not set from Python


class _Processes:
    """Executes runs in processes on this machine."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def execute(self, run: PlannedRun) -> None:
        """Executes a run to its end; its output goes to log.txt in its folder."""
        folder = RunFolder(run.folder)
        folder.write_json("config", run.config.to_dict())
        with (run.folder / "log.txt").open("ab") as output:
            with self._lock:
                if self._ended:
                    return
                process = start(run.folder, output)
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        check_result(run, code)

    def end(self) -> None:
        """Ends all processes."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()


def start(folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts or resumes the run of a folder, which holds its config, in a process of its own."""
    command = [sys.executable, "-m", "rlsprune", "run", "--resume", str(folder)]
    environment = {**_KEPT_MEMORY, **os.environ}
    return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)


def check_result(run: PlannedRun, code: int) -> None:
    """Raises RunFailedError with the last line of the log unless the exit code is 0."""
    if code:
        last = _last_line(run.folder / "log.txt")
        raise RunFailedError(f"the run in {run.folder} failed with exit code {code}: {last}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log}"
