"""A sweep on a local Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsprune.app.cli.main import main

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

OPTIONS = ["sweep", "digits-fnn", "--epochs", "2", "--warmup-epochs", "1", "--train-images", "300", "--threads", "1"]


def test_a_sweep_on_ray_is_the_sweep_of_this_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, where in ((here, []), (there, ["--ray"])):
        assert main([*OPTIONS, "--ratios", "0.2,0.4", "--out", str(folder), *where]) == 0
        assert (folder / "sweep.png").exists()
    for name in ("rls-20-seed0", "rls-40-seed0"):
        mine, theirs = (json.loads((folder / name / "summary.json").read_text()) for folder in (here, there))
        assert mine["accuracy"] == theirs["accuracy"]
        assert mine["weights_percent"] == theirs["weights_percent"]


def test_a_run_that_fails_on_ray_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [*OPTIONS[:1], "mnist-fnn", *OPTIONS[2:], "--data-dir", str(tmp_path / "none")]
    assert main([*missing, "--ratios", "0.2", "--out", str(tmp_path / "out"), "--ray"]) == 1
    assert "failed with exit code 3" in capsys.readouterr().err
