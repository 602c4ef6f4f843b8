"""`fit --max-drop`: the smallest network within a limit of a measured baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rlsprune
from app.fit.conftest import table
from app.fit.test_fit import mlp, run_onnx
from app.fit.test_tasks import prices, regressors  # noqa: F401 (fixtures)
from rlsprune.app.cli.main import main
from rlsprune.app.config.fit import FitConfig, make_fit_config
from rlsprune.app.fit.fit import load_own_data, make_own_recipe
from rlsprune.app.run.folder import RunFolder


def held_out(folder: RunFolder, build: nn.Module, name: str) -> float:
    """The score of a run's saved network on the examples that it was chosen by, in their own units."""
    config = FitConfig.from_dict(folder.read_json("config"))
    loaded = load_own_data(config)
    model = rlsprune.load(folder.model, into=build)
    outputs = model.eval()(loaded.valid.images).detach()
    if name == "r2":
        wanted = loaded.valid.labels
        return float(1 - (outputs - wanted).square().sum() / (wanted - wanted.mean()).square().sum())
    return 100 * float((outputs.argmax(1) == loaded.valid.labels).float().mean())


def test_trained_here_and_then_as_small_as_four_points_allow(
    networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), "--max-drop", "4", "--epochs", "6"]
    assert main([*command, "--threads", "1"]) == 0
    summary, folder = RunFolder(out).read_json("summary"), RunFolder(out)
    assert summary["weights_percent"] < 60
    assert summary["events"] == 1
    event = folder.read_lines("events")[0]
    assert summary["unpruned_accuracy"] == event["accuracy_before"]
    assert summary["accuracy"] == event["accuracy_after"]
    inputs, labels = table(60, 1)
    outputs = run_onnx(out / "model.onnx", inputs)
    assert 100 * np.mean(outputs.argmax(1) == labels) == pytest.approx(summary["accuracy"])
    assert f"{summary['unpruned_accuracy']:.2f} % unpruned, trained alike" in (out / "report.html").read_text()
    assert "Accuracy of the unpruned network" in capsys.readouterr().out
    assert folder.read_json("config")["images"] == [192, 60], "a fifth is held out"
    (out / "summary.json").unlink()
    assert main(["fit", "--resume", str(out), "--quiet"]) == 0
    assert RunFolder(out).read_json("summary")["accuracy"] == summary["accuracy"]


def test_given_weights_are_not_trained_before(networks: Path, npz: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = mlp()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    x, y = table(240, 0)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    torch.save(network.state_dict(), tmp_path / "given.pt")
    out = tmp_path / "run"
    command = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), "--weights", str(tmp_path / "given.pt")]
    assert main([*command, "--max-drop", "3", "--recovery-epochs", "0", "--threads", "1", "--quiet"]) == 0
    folder = RunFolder(out)
    summary = folder.read_json("summary")
    assert folder.read_lines("events")[0]["accuracy_before"] == pytest.approx(summary["given_accuracy"])
    assert summary["weights_percent"] < 90
    config = FitConfig.from_dict(folder.read_json("config"))
    valid = load_own_data(config).valid
    before = 100 * float((network(valid.images).argmax(1) == valid.labels).float().mean())
    assert held_out(folder, mlp(), "accuracy") >= before - 3


def test_limit_of_a_regressor_is_in_hundredths_of_r2(
    regressors: Path,  # noqa: F811
    prices: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{regressors}:ten", "--data", str(prices), "--out", str(out), "--max-drop", "3"]
    assert main([*command, "--epochs", "8", "--threads", "1", "--quiet"]) == 0
    summary = RunFolder(out).read_json("summary")
    assert summary["weights_percent"] < 90
    assert summary["r2"] > summary["unpruned_r2"] - 0.08, "measured on other examples than the limit"
    build = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    assert held_out(RunFolder(out), build, "r2") > 0.6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-drop", "0"], "--max-drop 0.0 is not valid: it must be above 0"),
        (["--max-drop", "1", "--no-prune"], "leave out --no-prune"),
        (["--max-drop", "1", "--gate", "train"], "leave out --gate, --baseline"),
        (["--max-drop", "1", "--baseline"], "leave out --gate, --baseline"),
        (["--max-drop", "1", "--features", "5"], "leave out --features, --tolerance, --allocate"),
        (["--max-drop", "1", "--tolerance", "0.1"], "leave out --features, --tolerance, --allocate"),
        (["--max-drop", "1", "--allocate"], "leave out --features, --tolerance, --allocate"),
        (["--recovery-epochs", "1"], "--recovery-epochs are those of --max-drop"),
        (["--features", "13"], "has only 12; give at most as many"),
    ],
)
def test_limits_that_are_none(
    options: list[str], said: str, networks: Path, npz: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), *options]) == 2
    assert said in capsys.readouterr().err


def test_few_held_out_examples_are_told(networks: Path, npz: Path) -> None:
    config = make_fit_config(f"{networks}:mlp", npz, max_drop=0.5)
    with pytest.warns(UserWarning, match="one of the 48 held-out examples, which is 2.1 points"):
        make_own_recipe(config, load_own_data(config))
