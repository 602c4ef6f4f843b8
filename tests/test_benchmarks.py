"""Every benchmark starts, stands in the benchmarks' README, and takes the arguments that the documentation gives it."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from rlsprune.app.config.experiment import make_config
from rlsprune.app.experiments.recipe import run
from rlsprune.app.run.folder import RunFolder

ROOT = Path(__file__).parent.parent
README = ROOT / "benchmarks" / "README.md"
FILES = [path for path in (ROOT / "benchmarks").glob("*/*.py") if "\ndef main(" in path.read_text(encoding="utf-8")]
NAMES = sorted(f"{path.parent.name}.{path.stem}" for path in FILES)
COMMAND = re.compile(r"python -m benchmarks\.([a-z0-9_.]+)([^`\n|#]*)")


def commands() -> list[tuple[str, str]]:
    """Name and arguments of every call of a benchmark in the documentation."""
    pages = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "Makefile"]
    return [call for page in pages for call in COMMAND.findall(page.read_text(encoding="utf-8"))]


class ParsedError(Exception):
    """The arguments were read: nothing more is wanted."""


@pytest.fixture
def _only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser) -> argparse.Namespace:
        parse(parser)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def start(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | None:
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
    code: int | None = importlib.import_module(f"benchmarks.{name}").main()
    return code


@pytest.mark.usefixtures("_only_parse")
@pytest.mark.filterwarnings("ignore:no (Shampoo|singd)")
@pytest.mark.parametrize(("name", "arguments"), sorted(set(commands())))
def test_documented_command_is_understood(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParsedError):
        start(name, arguments, monkeypatch)


def test_readme_gives_a_command_for_each() -> None:
    text = README.read_text(encoding="utf-8")
    assert {name for name, _ in COMMAND.findall(text)} == set(NAMES)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (README.parent / link).exists(), link


SMALL = {
    "speed.step_cost": ("--network fnn --threads 1 --rounds 1 --only rls", "| RLS "),
    "speed.prune_cost": ("--quick", "| RLS: obs, exact P |"),
    "speed.soak_run": ("--epochs 5", "500 steps, 5 prunes"),
    "speed.scaling": ("--ranks 2 --steps 1 --width 64", "2 RLS, P whole "),
    "quality.convergence": ("--quick --only rls,sgd --out {out}/curves", "| RLS | 1 | 1 | 28 |"),
    "quality.prune_accuracy": ("--quick", "| ours: obs, exact P "),
    "quality.events": ("--quick", "| 0.3 | as a whole |"),
    "quality.settings": ("--images 200 --only knobs", "| 0.6 | "),
    "quality.soak_inverse": ("--steps 20 --epochs 1 --width 8", "True"),
    "quality.ablation": (
        "digits-fnn --variants 'as it is' --epochs 3 --train-images 500 --valid-images 500 --out {out}",
        "| as it is |",
    ),
}
"""Name → arguments for a run of seconds, and what it prints when it has got there."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_small_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, printed = SMALL[name]
    start(name, arguments.format(out=tmp_path), monkeypatch)
    assert printed in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_benchmarks_of_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("digits-fnn", epochs=3, train_images=500)
    summary = run(config, RunFolder(tmp_path / "run"))
    accuracy = f"{summary['accuracy']:.2f}"
    start("quality.all_test_images", f"{tmp_path}/run {tmp_path}/run", monkeypatch)
    assert capsys.readouterr().out.count(f"| {accuracy} |") == 2
    start("quality.int8", f"{tmp_path}/run", monkeypatch)
    assert f"| {accuracy} % |" in capsys.readouterr().out
    start("quality.prune_accuracy", f"--run {tmp_path}/run --ratios 0.2", monkeypatch)
    assert f"run: {accuracy} %" in capsys.readouterr().out
