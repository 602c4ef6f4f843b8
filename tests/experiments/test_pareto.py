"""`rlsprune pareto` on a real, tiny run."""

import json
from pathlib import Path

import pytest

from rlsprune import io
from rlsprune.cli import main
from rlsprune.experiments.config import make_config
from rlsprune.experiments.run import load_data, make_recipe, run
from rlsprune.train.folder import RunFolder
from rlsprune.train.loop import evaluate

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
    assert "chosen:" in capsys.readouterr().out
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
