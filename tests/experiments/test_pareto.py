"""`rlsprune pareto` on a real, tiny run."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rlsprune import io
from rlsprune.cli import main
from rlsprune.experiments.config import make_config
from rlsprune.experiments.pareto import FrontSettings, shrink_run
from rlsprune.experiments.run import load_data, make_recipe, run
from rlsprune.profile import parameter_count
from rlsprune.train.folder import RunFolder
from rlsprune.train.loop import Evaluation, evaluate

SETTINGS = {"epochs": 4, "train_images": 600, "test_images": 100, "threads": 1}


def test_front_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = RunFolder(tmp_path / "run")
    config = make_config("digits-fnn", "none", optimizer="sgd", **SETTINGS)
    command = ["pareto", str(source.path), "--target", "0.3", "--ratio", "0.4", "--recovery-epochs", "1"]
    command.append("--no-spread")
    assert main(command) == 2
    assert "holds no finished run" in capsys.readouterr().err

    run(config, source)
    assert main(command) == 0
    assert "Chosen:" in capsys.readouterr().out
    out = source.path / "pareto"
    result = json.loads((out / "pareto.json").read_text())
    front = result["front"]
    assert result["settings"]["spread"] is False
    assert front[-1]["params"] <= 0.3 * front[0]["params"]
    assert front[0]["precision"] == source.read_json("summary")["final_precision"]
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")

    data = load_data(config)
    recipe = make_recipe(config, data)
    small = io.load(out / "model.safetensors", into=recipe.build_model())
    assert evaluate(small, recipe.evaluation_batches(data.test), recipe.loss).precision == front[-1]["precision"]

    assert main(command) == 2
    assert "holds a front already" in capsys.readouterr().err
    assert json.loads((out / "pareto.json").read_text()) == result


def test_the_last_point_within_the_drop_is_kept(tmp_path: Path) -> None:
    source, out = RunFolder(tmp_path / "run"), tmp_path / "pareto"
    config = make_config("digits-fnn", "none", optimizer="sgd", **SETTINGS)
    run(config, source)
    settings = FrontSettings(max_drop=2.0, target=None, ratio=0.4, recovery_epochs=0, lr=0.1, spread=False)
    result = shrink_run(config, source, out, settings)
    assert [point["within"] for point in result["front"]] == [True] * (len(result["front"]) - 1) + [False]
    assert result["chosen"] == len(result["front"]) - 2
    small = io.load(out / "model.safetensors", into=make_recipe(config, load_data(config)).build_model())
    assert parameter_count(small) == result["front"][result["chosen"]]["params"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, FloatingPointError])
def test_what_there_is_is_kept_when_it_is_stopped(tmp_path: Path, stop: type[BaseException]) -> None:
    source, out = RunFolder(tmp_path / "run"), tmp_path / "pareto"
    config = make_config("digits-fnn", "none", optimizer="sgd", **SETTINGS)
    run(config, source)
    rounds: list[str] = []

    def progress(stage: str, done: int, total: int | None) -> None:
        rounds.append(stage)
        if stage.startswith("round 3, recovery"):
            raise stop("stopped")

    settings = FrontSettings(max_drop=None, target=0.05, ratio=0.4, recovery_epochs=1, lr=0.1, spread=False)
    with pytest.raises(stop):
        shrink_run(config, source, out, settings, on_progress=progress)
    result = json.loads((out / "pareto.json").read_text())
    assert (result["finished"], result["chosen"], len(result["front"])) == (False, 2, 3)
    data = load_data(config)
    recipe = make_recipe(config, data)
    small = io.load(out / "model.safetensors", into=recipe.build_model())
    precision = evaluate(small, recipe.evaluation_batches(data.test), recipe.loss).precision
    assert precision == result["front"][2]["precision"], "the network of the last round that was finished"
    assert {"scoring", "round 1, pruning", "round 2, recovery epoch 1 of 1"} < set(rounds)


def test_a_point_that_was_not_looked_at_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = RunFolder(tmp_path / "run"), tmp_path / "pareto"
    config = make_config("digits-fnn", "none", optimizer="sgd", **SETTINGS)
    run(config, source)
    calls = itertools.count(1)

    def interrupted(*arguments: Any) -> Evaluation:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr("rlsprune.experiments.pareto.evaluate", interrupted)
    settings = FrontSettings(max_drop=None, target=0.05, ratio=0.4, recovery_epochs=1, lr=0.1, spread=False)
    with pytest.raises(KeyboardInterrupt):
        shrink_run(config, source, out, settings)
    result = json.loads((out / "pareto.json").read_text())
    assert (result["finished"], result["chosen"], len(result["front"])) == (False, 0, 1)
    assert (out / "model.safetensors").stat().st_size > 0.9 * source.model.stat().st_size
