import json
from pathlib import Path

import pytest

from rlsprune.cli import main
from rlsprune.experiments.table import aligned
from rlsprune.train.folder import RunFolder

OPTIONS = ["--epochs", "3", "--warmup-epochs", "1", "--train-images", "300", "--test-images", "100", "--threads", "1"]


def test_comparison_runs_what_is_missing_and_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "digits-fnn", "--methods", "l1-norm", *OPTIONS, "--jobs", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "| fc1   | 1024 |  802816 | 30.0 / 30.0 |" in table
    assert "| Total | 2330 | 1332224 | 53.8 / 21.7 |" in table
    assert "(98.9, 98.4)" in table, "the paper's own figures"
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    twin = RunFolder(tmp_path / "none-sgd-seed0").read_json("summary")
    pruned = RunFolder(tmp_path / "l1-norm-seed0").read_json("summary")
    column = comparison["methods"]["l1-norm"]
    assert column["unpruned"]["precision"]["mean"] == twin["precision"]
    assert column["precision"]["mean"] == pruned["precision"]
    event = RunFolder(tmp_path / "l1-norm-seed0").read_lines("events")[0]
    assert column["lost_per_event"] == pytest.approx(event["precision_before"] - event["precision_after"])
    assert (tmp_path / "comparison.md").read_text() in table

    before = (tmp_path / "l1-norm-seed0" / "summary.json").stat().st_mtime_ns
    assert main(command) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert (tmp_path / "l1-norm-seed0" / "summary.json").stat().st_mtime_ns == before

    assert main([*command, "--batch-size", "64"]) == 2
    assert "batch_size 64 instead of 128" in capsys.readouterr().err


def test_run_that_fails_is_named_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "mnist-fnn", "--methods", "l1-norm", "--out", str(tmp_path), "--data-dir", str(tmp_path)]
    assert main([*command, "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert "none-sgd-seed0 failed with exit code 3" in said
    assert "rlsprune data get mnist" in said


def test_sweep_draws_its_runs(tmp_path: Path) -> None:
    command = ["sweep", "digits-fnn", "--method", "rls-paper", "--ratios", "0.3", *OPTIONS, "--out", str(tmp_path)]
    assert main([*command, "--quiet"]) == 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert RunFolder(tmp_path / "rls-paper-30-seed0").finished


def test_table_columns_line_up() -> None:
    lines = aligned([["a", "long head"], ["name", "1"]]).splitlines()
    assert lines == ["| a    | long head |", "|------|----------:|", "| name |         1 |"]
