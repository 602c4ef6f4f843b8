"""What a run shows: live on a terminal, in lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlsprune.app.cli.live import LiveObserver
from rlsprune.app.cli.terminal import LineObserver, name_run
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained

TINY = ["--train-images", "300", "--test-images", "100", "--threads", "1", "--warmup-epochs", "1"]


class Terminal:
    """A process on a terminal of its own, and all that it wrote there."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self.written, self._master = process, b"", master

    @property
    def text(self) -> str:
        """Without the codes that move the cursor and colour the text."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode(errors="replace"))

    def read(self, until: str | None = None) -> None:
        """Reads until some text was written, or the process has closed the terminal."""
        deadline = time.monotonic() + 120
        while until is None or until not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self._master], [], [], 1)[0]:
                try:
                    more = os.read(self._master, 65536)
                except OSError:  # how Linux tells that nobody writes any more
                    more = b""
                if not more:
                    assert until is None, self.text[-2000:]
                    return
                self.written += more


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[Terminal]:
    """Starts a command on a terminal of 100 by 30 characters."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlsprune", *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_live_display_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "a run"
    with on_a_terminal("run", *TINY, "--epochs", "300", "--out", str(out)) as terminal:
        terminal.read("epoch 2: pruned input 784→")
        terminal.read("prunes when the held-out loss is below")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read()
        assert terminal.process.wait(60) == 130
    shown = terminal.text
    assert "open from epoch 2 on" in shown, "the gate, before the first prune"
    assert re.search(r"epoch +[━╸╺]+.* \d+/300", shown)
    assert re.search(r"batch +[━╸╺]+.* \d/3", shown)
    assert re.search(r"loss +0\.\d{4} in this batch", shown)
    assert re.search(r"accuracy +\d+\.\d\d %", shown)
    assert re.search(r"input +█+ +784 of 784 +100\.0 %", shown), "the network at full size"
    assert re.search(r"fc1 +█+░+ +\d+ of 1,024", shown), "and smaller"
    assert "\x1b[?25h" in terminal.written.decode()[-400:], "the cursor is there again"
    # With its quotes, as a shell would take it.
    assert f"Resume with: rlsprune run --resume '{out}'" in shown.replace("\r\n", "")
    assert "Traceback" not in shown

    folder = RunFolder(out)
    done = len(folder.read_lines("metrics"))
    assert done >= 2
    assert not folder.finished
    folder.write_json("config", {**folder.read_json("config"), "epochs": done + 1})
    with on_a_terminal("run", "--resume", str(out)) as terminal:
        terminal.read()
        assert terminal.process.wait(60) == 0
    # The signal may come when an epoch's checkpoint is written and its line of metrics is not.
    assert re.search(rf"resumed after epoch ({done}|{done + 1})\b", terminal.text)
    assert len(folder.read_lines("metrics")) == done + 1
    assert re.search(r"fc1 +\d+ +\d+\.\d % +[\d,]+ +\d+\.\d %", terminal.text), "the table at the end"
    assert "report.html" in terminal.text
    assert folder.finished
    assert (out / "report.html").is_file()


def test_not_on_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlsprune", "run", *TINY, "--epochs", "2", "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # which knows no arrow
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert any(line.startswith("  epoch 2: pruned input 784?") for line in lines)
    assert lines[-1].endswith("report.html")


def rows(*channels: int, full: int = 100) -> list[dict[str, Any]]:
    return [
        {"name": f"layer{i}", "channels": n, "weights": n, "nodes_percent": 100 * n / full, "weights_percent": 50.0}
        for i, n in enumerate(channels)
    ]


@pytest.fixture
def shown() -> Iterator[tuple[LiveObserver, Console]]:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    observer = LiveObserver(console)
    observer.start({"method": "rls", "experiment": "x", "seed": 0, "gate": "valid", "pruning": {}}, 0, 9, 5)
    yield observer, console
    observer.close()


def frame(observer: LiveObserver, console: Console) -> str:
    """What is shown now, on a console that draws nothing else."""
    other = Console(file=io.StringIO(), width=console.width, height=console.height, color_system=None)
    with other.capture() as captured:
        other.print(observer._render())
    return captured.get()


@pytest.mark.parametrize("kind", [LineObserver, LiveObserver])
@pytest.mark.parametrize("name", ["nets[v2].py:f", "nets[/v2].py:f", ":cat:"])
def test_names_are_shown_as_they_are(kind: type[LineObserver], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    observer = kind()
    observer.start({"method": "rls", "experiment": name, "seed": 0}, 0, 9, 5)
    observer.network(torch.nn.Identity(), [{**rows(7)[0], "name": name}], [])
    observer.event(
        {
            "epoch": 1,
            "kind": "prune",
            "layers": [{"name": name, "before": 2, "after": 1}],
            "accuracy_before": 1.0,
            "accuracy_after": 1.0,
        }
    )
    observer.close()
    assert f"rls on {name}, seed 0" in (shown := capsys.readouterr().out)
    assert f"pruned {name} 2→1" in shown


@pytest.mark.parametrize(("quantity", "named"), [("params", "parameters"), ("flops", "FLOPs")])
def test_a_missed_target_names_its_quantity(quantity: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"method": "rls", "experiment": "digits-fnn", "seed": 0, "pruning": {"target_of": quantity}}
    observer = LineObserver()
    observer.start(run, 0, 9, 5)
    result = {"accuracy": 90.0, "weights_percent": 40.0, "flops_percent": 40.0, "seconds": 1.0, "missed_target": 0.1}
    observer.end({**run, **result})
    assert f"The target, 10 % of the {named}, is not reached" in capsys.readouterr().out


METRICS = {"epoch": 3, "train_loss": 0.5, "gate_loss": 0.4, "accuracy": 90.0, "weights_percent": 40.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate_level": 0.45}, "prunes when the held-out loss is below 0.4500; it is 0.4000"),
        ({"gate_level": 0.45, "gate_loss": None}, "prunes when the held-out loss is below 0.4500\n"),
        (
            {"gate_level": 0.45, "pruned": True},
            "prunes when the held-out loss is below 0.4500; pruned after epoch 3\n",
        ),
        (
            {"gate_level": 0.35, "pruning_ended": True},
            "last prune, kept if the held-out loss is below 0.3500; it is 0.4000\n",
        ),
        ({"gate_level": None}, "pruning has ended"),
        ({"gate_level": None, "weights_percent": 100.0}, "open from epoch 1 on"),
    ],
)
def test_gate_is_told(shown: tuple[LiveObserver, Console], changes: dict[str, Any], said: str) -> None:
    observer, console = shown
    observer.epoch({**METRICS, **changes}, {})
    assert said in "\n".join(line.rstrip() for line in frame(observer, console).splitlines()) + "\n"


@pytest.mark.parametrize("changes", [{"pruning": None}, {"method": "none"}], ids=str)
def test_where_nothing_waits_for_a_loss_no_gate_is_told(changes: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    observer = LiveObserver(console)
    config = {"method": "l1-norm", "experiment": "x", "seed": 0, "gate": "train", "pruning": {}, **changes}
    observer.start(config, 0, 9, 5)
    observer.close()
    assert "this method does not wait for a loss" in frame(observer, console)


def test_bars_are_to_scale_and_fit_any_terminal(shown: tuple[LiveObserver, Console]) -> None:
    observer, console = shown
    observer.network(torch.nn.Identity(), rows(100, 50, 25), [])
    bars = [line for line in frame(observer, console).splitlines() if line.startswith("layer")]
    lengths = [(line.count("█"), line.count("░")) for line in bars]
    widest = lengths[0][0]
    assert lengths == [(widest, 0), (widest // 2, widest - widest // 2), (widest // 4, widest - widest // 4)]
    observer.network(torch.nn.Identity(), rows(*[10] * 200), [])
    tall = frame(observer, console).splitlines()
    assert len(tall) <= 24
    assert "layers more" in tall[-1]
    assert max(map(len, tall)) <= 80


def test_method_and_optimizer_are_not_mixed_up() -> None:
    run = {"method": "rls", "optimizer": "rls", "experiment": "x", "seed": 1}
    assert name_run(run) == "rls on x, seed 1"
    assert name_run({**run, "optimizer": "adamw"}) == "adamw with pruning on x, seed 1"
    assert name_run({**run, "optimizer": "sgd", "method": "none"}) == "sgd without pruning on x, seed 1"
    assert name_run({**run, "optimizer": "sgd", "method": "l1-norm"}) == "l1-norm on x, seed 1"


def test_loss_is_looked_at_now_and_then_only(shown: tuple[LiveObserver, Console]) -> None:
    observer, _ = shown
    looks = 0

    class Counted:
        def __float__(self) -> float:
            nonlocal looks
            looks += 1
            return 0.5

    for number in range(1, 1001):
        observer.batch(number % 5 + 1, Counted())  # type: ignore[arg-type]
    assert 1 <= looks < 500


def test_counts_are_not_needed_for_the_display(shown: tuple[LiveObserver, Console]) -> None:
    observer, console = shown
    observer.network(torch.nn.Identity(), rows(7), [])
    observer.epoch({**METRICS, "gate_level": None}, {"layer0": Retained(7, 7, 7)})
    assert "7 of 100" in frame(observer, console)
