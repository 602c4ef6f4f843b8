import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsprune.app.cli.main import main
from rlsprune.app.experiments.queue import PlannedRun, comparison, sweep
from rlsprune.app.experiments.recipe import run
from rlsprune.app.experiments.table import aligned
from rlsprune.app.run.folder import RunFolder

SETTINGS = {"epochs": 3, "warmup_epochs": 1, "train_images": 300, "test_images": 100, "threads": 1}
OPTIONS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def finish(planned: PlannedRun) -> None:
    """In this process, which saves the start of another."""
    run(planned.config, RunFolder(planned.folder))


def test_comparison_runs_what_is_missing_and_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin, pruned = comparison("digits-fnn", ["l1-norm"], [0], tmp_path, **SETTINGS)
    finish(pruned)
    before = (pruned.folder / "summary.json").stat().st_mtime_ns
    command = ["compare", "digits-fnn", "--methods", "l1-norm", *OPTIONS, "--jobs", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    table = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert "| fc1 | 1024 | 802816 | 30.0 / 30.0 |" in rows
    assert "| Total | 2330 | 1332224 | 53.8 / 21.7 |" in rows
    assert "(98.9, 98.4)" in table, "the paper's own figures"
    assert "1/2 l1-norm-seed0 (finished before)" in table
    assert (pruned.folder / "summary.json").stat().st_mtime_ns == before

    figures = json.loads((tmp_path / "comparison.json").read_text())
    column = figures["methods"]["l1-norm"]
    assert column["unpruned"]["accuracy"]["mean"] == RunFolder(twin.folder).read_json("summary")["mean_accuracy"]
    assert column["accuracy"]["mean"] == RunFolder(pruned.folder).read_json("summary")["mean_accuracy"]
    event = RunFolder(pruned.folder).read_lines("events")[0]
    assert column["lost_per_event"] == pytest.approx(event["accuracy_before"] - event["accuracy_after"])
    assert (tmp_path / "comparison.md").read_text() in table
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "The runs side by side" in (tmp_path / "report.html").read_text(encoding="utf-8")

    # Of all methods, the finished ones: the same table, and nothing is run.
    finished = ["compare", "digits-fnn", *OPTIONS, "--finished", "--out", str(tmp_path)]
    assert main(finished) == 0
    assert (tmp_path / "comparison.md").read_text() in table

    # Runs are not gone on with under other settings; finished ones are compared with their own, which is said.
    assert main([*command, "--batch-size", "64"]) == 2
    assert "batch_size 64 instead of 128" in capsys.readouterr().err
    assert main([*finished, "--batch-size", "64"]) == 0
    assert "l1-norm-seed0 was run with batch_size 128 instead of 64" in capsys.readouterr().err
    assert (tmp_path / "comparison.md").read_text() in table
    assert main([*finished, "--preset", "paper"]) == 2
    assert "holds another run: preset 'short' instead of 'paper'" in capsys.readouterr().err


def test_finished_runs_are_compared_without_those_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = ["compare", "digits-fnn", "--finished", *OPTIONS, "--out", str(tmp_path)]
    assert main(finished) == 2
    assert "no finished run" in capsys.readouterr().err
    _, pruned = comparison("digits-fnn", ["l1-norm"], [0], tmp_path, **SETTINGS)
    finish(pruned)
    assert main(finished) == 2
    assert "none of the finished runs is unpruned" in capsys.readouterr().err
    slimming = comparison("digits-fnn", ["net-slimming"], [0], tmp_path, **SETTINGS)[0]
    finish(slimming)
    assert main(finished) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| l1-norm"))
    assert "(" not in row, "its unpruned twin is not there"


def test_run_that_fails_is_named_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "mnist-fnn", "--methods", "l1-norm", "--out", str(tmp_path), "--data-dir", str(tmp_path)]
    assert main([*command, "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert "none-sgd-seed0 failed with exit code 3" in said
    assert "rlsprune data get mnist" in said


def test_sweep_draws_its_runs(tmp_path: Path) -> None:
    for planned in sweep("digits-fnn", "rls-paper", [0.3], [0], tmp_path, **SETTINGS):
        finish(planned)
    command = ["sweep", "digits-fnn", "--method", "rls-paper", "--ratios", "0.3", *OPTIONS, "--out", str(tmp_path)]
    assert main([*command, "--quiet"]) == 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_sigterm_ends_the_runs_before_it_ends_their_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlsprune", "sweep", "digits-fnn", "--ratios", "0.3", "--epochs", "1000"]
    parent = subprocess.Popen([*command, "--threads", "1", "--quiet", "--out", str(tmp_path)])
    child = tmp_path / "rls-30-seed0"
    try:
        deadline = time.monotonic() + 120
        while not (child / "metrics.jsonl").is_file():  # it trains
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 128 + signal.SIGTERM
        with RunFolder(child).locked():  # nobody else holds it
            pass
    finally:
        parent.terminate()
        parent.wait(60)


def test_table_columns_line_up() -> None:
    lines = aligned([["a", "long head"], ["name", "1"]]).splitlines()
    assert lines == ["| a    | long head |", "|------|----------:|", "| name |         1 |"]
