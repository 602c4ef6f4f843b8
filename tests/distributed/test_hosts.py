"""Two hosts: network namespaces with addresses of their own, joined by a cable that can be cut.

`make test-all` runs this as root, on Linux with `ip`; elsewhere it is skipped, and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.runs import agree
from distributed.test_kills import end, fit, results, run, task

__all__ = ["task"]  # a fixture

TIMEOUT = 20  # seconds in which a rank has to answer, where another is lost
PATIENCE = 300  # and where none is: rank 0 writes and measures alone, on a machine that may be busy
PORT = 29517


class Host:
    """A network namespace with one end of the cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.cable = name, address, f"{name}-eth"
        self._started: list[subprocess.Popen[bytes]] = []

    def sh(self, *words: str) -> None:
        """A command of `ip` in the namespace."""
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def start(self, number: int, arguments: list[str], log: Path, timeout: int) -> subprocess.Popen[bytes]:
        """One rank of a run of both hosts."""
        launcher = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"]
        where = ["--master-addr=10.77.0.1", f"--master-port={PORT}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.cable,
            "RLSPRUNE_TIMEOUT": str(timeout),
        }
        python = [sys.executable, "-m", "torch.distributed.run", *launcher, *where, "-m", "rlsprune", *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *python],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """The host is gone, with all that runs on it."""
        running = subprocess.run(["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True)
        end([int(pid) for pid in running.stdout.split()])
        for process in self._started:
            process.wait()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    tag = f"rp{os.getpid() % 10000}"
    pair = [Host(f"{tag}a", "10.77.0.1/24"), Host(f"{tag}b", "10.77.0.2/24")]
    if shutil.which("ip") is None:
        pytest.skip("two hosts are not tested: there is no `ip` (apt-get install iproute2)")
    try:
        for host in pair:
            subprocess.run(["ip", "netns", "add", host.name], check=True, capture_output=True)
        ends = [pair[0].cable, "netns", pair[0].name, "type", "veth", "peer", "name", pair[1].cable]
        subprocess.run(["ip", "link", "add", *ends, "netns", pair[1].name], check=True, capture_output=True)
        for host in pair:
            host.sh("addr", "add", host.address, "dev", host.cable)
            for link in ("lo", host.cable):
                host.sh("link", "set", link, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two hosts are not tested: network namespaces are not allowed here ({error.stderr.decode()!r})")
    try:
        yield pair
    finally:
        for host in pair:
            host.stop()
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def started(hosts: list[Host], arguments: list[str], logs: Path, timeout: int) -> list[subprocess.Popen[bytes]]:
    return [host.start(number, arguments, logs / f"{number}.log", timeout) for number, host in enumerate(hosts)]


def until_saved(folder: Path, processes: list[subprocess.Popen[bytes]], logs: Path) -> None:
    while not (folder / "checkpoint" / "epoch-000003").exists():
        assert all(process.poll() is None for process in processes), (logs / "0.log").read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_two_hosts_do_what_two_processes_do(hosts: list[Host], task: Path, tmp_path: Path) -> None:
    run(2, *fit(task, "with_dropout", tmp_path / "one"))
    for process in started(hosts, fit(task, "with_dropout", tmp_path / "two"), tmp_path, PATIENCE):
        assert process.wait(2 * PATIENCE) == 0, "".join(log.read_text() for log in sorted(tmp_path.glob("?.log")))
    assert results(tmp_path / "two") == results(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["a host is gone", "the network is cut"])
def test_what_is_left_goes_on(hosts: list[Host], task: Path, tmp_path: Path, trouble: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(1, *fit(task, "without", whole))
    processes = started(hosts, fit(task, "without", broken), tmp_path, TIMEOUT)
    until_saved(broken, processes, tmp_path)
    if trouble == "a host is gone":
        hosts[1].stop()
    else:
        hosts[1].sh("link", "set", hosts[1].cable, "down")
    assert processes[0].wait(6 * TIMEOUT) != 0, "the other host goes on as if nothing had happened"
    assert not (broken / "summary.json").exists()
    hosts[1].stop()
    run(1, "fit", "--resume", str(broken), "--quiet")
    agree(broken, whole, tolerance=1e-3)
