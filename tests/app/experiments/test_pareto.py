"""`rlsprune pareto` on a real, tiny run."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.experiments.pareto import FrontSettings, shrink_run
from rlsprune.app.experiments.recipe import load_data, make_recipe, run
from rlsprune.app.fit.fit import load_own_data, make_own_recipe
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.scores import Scored, Scoring
from rlsprune.io import modelfile
from rlsprune.model.counts import parameter_count
from rlsprune.training.loop import evaluate

CONFIG = make_config("digits-fnn", "none", optimizer="sgd", epochs=4, train_images=600, test_images=100, threads=1)
SETTINGS = FrontSettings(max_drop=None, target=0.05, ratio=0.4, recovery_epochs=1, lr=0.1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run."""
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    run(CONFIG, folder)
    return folder


def small_network(out: Path) -> tuple[int, float]:
    """Parameters and test accuracy of what was written."""
    data = load_data(CONFIG)
    recipe = make_recipe(CONFIG, data)
    network = modelfile.load(out / "model.safetensors", into=recipe.build_model())
    return parameter_count(network), evaluate(network, recipe.evaluation_batches(data.test), recipe.loss).accuracy


def test_front_of_a_finished_run(source: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pareto"
    options = ["--target", "0.3", "--ratio", "0.4", "--recovery-epochs", "1", "--out", str(out)]
    assert main(["pareto", str(tmp_path / "none"), *options]) == 2
    assert "holds no finished run" in capsys.readouterr().err

    assert main(["pareto", str(source.path), *options]) == 0
    assert "Chosen:" in capsys.readouterr().out
    result = json.loads((out / "pareto.json").read_text())
    front = result["front"]
    assert front[-1]["params"] <= 0.3 * front[0]["params"]
    assert front[0]["accuracy"] == source.read_json("summary")["accuracy"]
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert small_network(out) == (front[-1]["params"], front[-1]["accuracy"])

    assert main(["pareto", str(source.path), *options]) == 2
    assert "already holds a front" in capsys.readouterr().err
    assert json.loads((out / "pareto.json").read_text()) == result


def test_the_last_point_within_the_drop_is_kept(source: RunFolder, tmp_path: Path) -> None:
    result = shrink_run(CONFIG, source, tmp_path, replace(SETTINGS, max_drop=2.0, target=None, recovery_epochs=0))
    front, chosen = result["front"], result["chosen"]
    within = [point["within"] for point in front]
    assert within[0]
    assert within[chosen]
    assert not any(within[chosen + 1 :])
    assert 0 < chosen < len(front) - 1
    assert small_network(tmp_path) == (front[chosen]["params"], front[chosen]["accuracy"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, FloatingPointError])
def test_what_there_is_is_kept_when_it_is_stopped(source: RunFolder, tmp_path: Path, stop: type[BaseException]) -> None:
    rounds: list[str] = []

    def progress(stage: str, done: int, total: int | None) -> None:
        rounds.append(stage)
        if stage.startswith("round 3, recovery"):
            raise stop("stopped")

    with pytest.raises(stop):
        shrink_run(CONFIG, source, tmp_path, SETTINGS, on_progress=progress)
    result = json.loads((tmp_path / "pareto.json").read_text())
    assert (result["finished"], result["chosen"], len(result["front"])) == (False, 2, 3)
    last = result["front"][2]
    assert small_network(tmp_path) == (last["params"], last["accuracy"])
    assert {"scoring", "round 1, batch norms", "round 2, recovery epoch 1 of 1"} < set(rounds)


def test_a_point_that_was_not_looked_at_is_not_there(
    source: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measured = itertools.count(1), Scoring.__call__

    def interrupted(*arguments: Any) -> Scored:
        if next(calls) == 5:  # held-out and test images; held-out after the cut and after recovery, and test images
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(Scoring, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shrink_run(CONFIG, source, tmp_path, SETTINGS)
    result = json.loads((tmp_path / "pareto.json").read_text())
    assert (result["finished"], result["chosen"], len(result["front"])) == (False, 0, 1)
    assert small_network(tmp_path)[0] == result["front"][0]["params"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_front_of_a_run_of_fit(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the user's own data, unscaled columns and all; the score is the task's own."""
    random = np.random.default_rng(0)
    x = (random.random((400, 6)) * (1, 100, 1, 1, 1, 1)).astype(np.float32)
    y = x[:, 0] + x[:, 1] / 100 if task == "regression" else (x[:, 0] > x[:, 1] / 100).astype(int)
    np.savez(tmp_path / "data.npz", x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    outputs = 1 if task == "regression" else 2
    (tmp_path / "nets.py").write_text(
        f"from torch import nn\ndef net():\n"
        f"    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, {outputs}))\n"
    )
    out, metric = tmp_path / "run", "r2" if task == "regression" else "accuracy"
    model = f"{tmp_path}/nets.py:net"
    quick = ["--data", f"{tmp_path}/data.npz", "--epochs", "5", "--no-prune", "--threads", "1", "--quiet"]
    assert main(["fit", model, *quick, "--out", str(out)]) == 0
    assert main(["pareto", str(out), "--target", "0.5", "--recovery-epochs", "1", "--ratio", "0.3"]) == 0
    told = capsys.readouterr().out
    assert "Chosen: " in told
    assert "may have trained on the held-out examples" in told
    result = json.loads((out / "pareto" / "pareto.json").read_text())
    front, summary = result["front"], json.loads((out / "summary.json").read_text())
    assert result["metric"] == metric
    assert front[0][metric] == pytest.approx(summary[metric], abs=1e-4)
    config = FitConfig.from_dict(RunFolder(out).read_json("config"))
    recipe = make_own_recipe(replace(config, standardise=False), load_own_data(config))
    small = modelfile.load(out / "pareto" / "model.safetensors", into=recipe.build_model())
    assert parameter_count(small) <= 0.5 * front[0]["params"]
    found = recipe.scoring(small, recipe.evaluation_batches(recipe.data.test), recipe.loss).scores[metric]
    assert found == pytest.approx(front[result["chosen"]][metric], abs=1e-3), "the file takes unscaled columns"


@pytest.mark.parametrize("gate", ["train", "valid"])
def test_front_of_a_run_of_fit_on_data_that_changed(
    gate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).random((100, 6)).astype(np.float32)
    arrays = {"x_train": x, "y_train": (x[:, 0] > 0.5).astype(int), "x_test": x, "y_test": (x[:, 0] > 0.5).astype(int)}
    np.savez(tmp_path / "data.npz", **arrays)
    (tmp_path / "nets.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(6, 2)\n")
    out, options = tmp_path / "run", ["--epochs", "1", "--no-prune", "--gate", gate, "--threads", "1", "--quiet"]
    assert main(["fit", f"{tmp_path}/nets.py:net", "--data", f"{tmp_path}/data.npz", *options, "--out", str(out)]) == 0
    np.savez(tmp_path / "data.npz", **{name: array[:90] for name, array in arrays.items()})
    assert main(["pareto", str(out), "--target", "0.5"]) == 3
    assert "changed since the run was started" in capsys.readouterr().err
    (out / "summary.json").unlink()
    assert main(["pareto", str(out)]) == 2
    assert "`rlsprune fit --resume`" in capsys.readouterr().err
