"""Runs on the machines of a Ray cluster, which share a file system with this one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlsprune.app.experiments.jobs import RunFailedError, check_result, start
from rlsprune.app.experiments.queue import PlannedRun
from rlsprune.app.run.folder import RunFolder

__all__ = ["RayTasks"]


class RayTasks:
    """One Ray task per run, with as many of the machine's CPUs as the run has threads.

    It joins the cluster that the environment names (``RAY_ADDRESS``), or starts a local one. A task that Ray loses with
    its machine restarts from the run's last checkpoint.
    """

    def __init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts, which reports usage by default
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ValueError('--ray needs Ray: run `pip install "rlsprune[ray]"`') from error
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(include_dashboard=False, log_to_driver=False)
        self._tasks: set[Any] = set()

    @property
    def slots(self) -> int:
        """Returns the CPUs of the whole cluster, the most runs at a time."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def execute(self, run: PlannedRun) -> None:
        """Executes a run to its end on any machine; its output goes to log.txt in its folder."""
        RunFolder(run.folder).write_json("config", run.config.to_dict())
        gpus = 1 if run.config.device.startswith("cuda") else 0
        cpus = min(run.config.threads, largest_machine(self._ray.nodes()))
        remote = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(_run)
        task = remote.remote(str(run.folder.resolve()))
        self._tasks.add(task)
        try:
            code = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            raise RunFailedError(f"Ray could not execute the run in {run.folder}: {error}") from error
        finally:
            self._tasks.discard(task)
        check_result(run, code)

    def end(self) -> None:
        """Ends all tasks."""
        for task in list(self._tasks):
            self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Leaves the cluster, and stops it if it was started here."""
        if self._started:
            self._ray.shutdown()


def largest_machine(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Returns the most CPUs of any live machine; a task that wants more would wait for ever."""
    return max([1, *(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])])


def _run(folder: str) -> int:
    """Executes one run on a machine of the cluster."""
    with (Path(folder) / "log.txt").open("ab") as output:
        process = start(Path(folder), output)
        try:
            return process.wait()
        except BaseException:  # a task that ends leaves no run behind
            process.kill()
            raise
