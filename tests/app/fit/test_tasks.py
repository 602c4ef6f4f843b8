"""`rlsprune fit` for classes, numbers and several labels at once, told apart by the labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn import metrics
from sklearn.datasets import load_diabetes, make_friedman1, make_multilabel_classification
from torch import nn

import rlsprune
from app.fit.conftest import table
from app.fit.test_fit import QUICK, run_onnx
from rlsprune.app.cli.main import main
from rlsprune.app.config.fit import make_fit_config
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.config.metrics import METRICS, Metric, find_metrics
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.labels import read_labels
from rlsprune.app.data.tables import read_table
from rlsprune.app.fit.fit import load_own_data, make_own_recipe
from rlsprune.app.fit.targets import find_target_scale
from rlsprune.app.fit.task import class_weights
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.scores import Scoring

REGRESSORS = """
from torch import nn

def ten():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs):
        return self.layers(inputs).squeeze(-1)

def rigid():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))

def five():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))

def pair():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
"""


@pytest.fixture
def regressors(tmp_path: Path) -> Path:
    path = tmp_path / "regressors.py"
    path.write_text(REGRESSORS)
    return path


def write(path: Path, x: np.ndarray, y: np.ndarray, split: int) -> Path:
    np.savez(path, x_train=x[:split], y_train=y[:split], x_test=x[split:], y_test=y[split:])
    return path


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """Friedman1 in large units: five columns make the target, five are noise."""
    x, y = make_friedman1(600, noise=0.5, random_state=0)
    return write(tmp_path / "prices.npz", x.astype(np.float32), 1e4 * y + 3e5, 500)


@pytest.mark.parametrize("network", ["ten", "Flat", "rigid"])
def test_numbers_are_predicted_in_the_users_unit(
    network: str, regressors: Path, prices: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if network == "rigid":  # no bias takes the mean of the targets over
        with np.load(prices) as arrays:
            values = {name: array - 3e5 - 14e4 if name[0] == "y" else array for name, array in arrays.items()}
        np.savez(prices, **{name: array / 5e4 if name[0] == "y" else array for name, array in values.items()})
    out = tmp_path / "run"
    command = ["fit", f"{regressors}:{network}", "--data", str(prices), "--out", str(out), "--epochs", "15"]
    assert main([*command, "--threads", "1", "--target", "0.4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["task"], summary["metric"]) == ("regression", "r2")
    assert "accuracy" not in json.dumps(summary)
    assert summary["weights_percent"] < 60
    with np.load(prices) as arrays:
        inputs, targets = arrays["x_test"], arrays["y_test"]
    outputs = run_onnx(out / "model.onnx", inputs).reshape(-1)
    assert metrics.r2_score(targets, outputs) == pytest.approx(summary["r2"], abs=1e-4)
    assert metrics.mean_absolute_error(targets, outputs) == pytest.approx(summary["mae"], rel=1e-3)
    assert summary["r2"] > 0.7
    event = RunFolder(out).read_lines("events")[0]
    assert {"r2_before", "r2_after"} <= event.keys()
    page = (out / "report.html").read_text()
    assert f"{summary['r2']:.4f}" in page
    assert "ccuracy" not in page
    config = RunFolder(out).read_json("config")
    assert (config["task"], config["loss"], config["metric"]) == ("regression", "mse", "r2")


def test_regression_is_compared_with_a_measured_baseline_and_resumed(
    regressors: Path, prices: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{regressors}:ten", "--data", str(prices), "--out", str(out), "--baseline"]
    assert main([*command, "--epochs", "4", "--metric", "mae", "--loss", "huber", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    summary = RunFolder(out).read_json("summary")
    assert f"Mean absolute error of the unpruned network, trained alike: {summary['unpruned_mae']:.4f}" in said
    assert f"mean absolute error {summary['mae']:.4f}, {summary['weights_percent']:.1f} % of the weights" in said
    assert f"{summary['unpruned_mae']:.4f} unpruned, trained alike" in (out / "report.html").read_text()
    assert summary["unpruned_mae"] == RunFolder(out / "unpruned").read_json("summary")["mae"]
    (out / "summary.json").unlink()
    assert main(["fit", "--resume", str(out)]) == 0
    again = RunFolder(out).read_json("summary")
    assert all(again[name] == summary[name] for name in ("mae", "r2", "unpruned_mae"))


def test_given_weights_of_a_regressor_say_the_same_on_scaled_targets(
    regressors: Path, prices: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    network[2].bias.data.fill_(4e5)
    torch.save(network.state_dict(), tmp_path / "given.pt")
    config = make_fit_config(f"{regressors}:ten", prices, weights=tmp_path / "given.pt")
    loaded = load_own_data(config)
    recipe = make_own_recipe(config, loaded)
    assert float(recipe.data.train.labels.std()) == pytest.approx(1, abs=0.01)
    with torch.no_grad():
        outputs = network(loaded.test.images).numpy()
    wanted = metrics.mean_absolute_error(loaded.test.labels.numpy(), outputs)
    assert recipe.title["given_mae"] == pytest.approx(wanted, rel=1e-3)
    model = recipe.build_model()
    recipe.prepare(model)
    with torch.no_grad():
        again = recipe.delivered(model)(loaded.test.images)
    assert np.allclose(again.numpy(), outputs, rtol=1e-4)


@pytest.mark.parametrize(
    ("end", "scaled"),
    [
        (nn.Identity(), True),
        (nn.ReLU(inplace=True), False),
        (nn.Hardtanh(inplace=True), False),
        (nn.LeakyReLU(inplace=True), False),
    ],
)
@pytest.mark.parametrize("bias", [-5.0, 0.0, 5.0])
def test_targets_are_scaled_only_where_the_last_layer_says_them(
    end: nn.Module, scaled: bool, bias: float, regressors: Path, prices: Path
) -> None:
    data = load_own_data(make_fit_config(f"{regressors}:ten", prices))
    network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), end)
    network[2].bias.data.fill_(bias)
    assert (find_target_scale(network, data) is not None) == scaled


def test_several_labels_at_once(regressors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = make_multilabel_classification(500, n_features=10, n_classes=5, random_state=0)
    data, out = write(tmp_path / "labels.npz", x.astype(np.float32), y, 400), tmp_path / "run"
    command = ["fit", f"{regressors}:five", "--data", str(data), "--out", str(out), "--class-weights", "balanced"]
    assert main([*command, "--epochs", "8", "--threads", "1", "--metric", "auc", "--target", "0.5"]) == 0
    summary = RunFolder(out).read_json("summary")
    assert summary["task"] == "multi-label"
    outputs = run_onnx(out / "model.onnx", x[400:].astype(np.float32))
    assert 100 * metrics.roc_auc_score(y[400:], outputs) == pytest.approx(summary["auc"], abs=0.01)
    assert 100 * metrics.f1_score(y[400:], outputs > 0, average="macro") == pytest.approx(summary["f1"], abs=0.5)
    assert 100 * np.mean((outputs > 0) == y[400:]) == pytest.approx(summary["accuracy"], abs=0.5)
    assert summary["auc"] > 70
    assert f"AUC {summary['auc']:.2f} %" in capsys.readouterr().out


def test_tables_have_named_columns(regressors: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "diabetes.csv", tmp_path / "run"
    frame = load_diabetes(as_frame=True, scaled=False).frame.assign(patient=[f"p{i}" for i in range(442)])
    frame.to_csv(path, index=False)
    command = ["fit", f"{regressors}:ten", "--data", str(path), "--label", "target", "--drop-columns", "patient"]
    few = ["--target", "0.5", "--features", "7", "--tolerance", "1"]
    assert main([*command, *few, "--out", str(out), "--epochs", "12", "--threads", "1", "--quiet"]) == 0
    summary, config = RunFolder(out).read_json("summary"), RunFolder(out).read_json("config")
    assert config["columns"] == ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert (config["classes"], config["images"][1]) == (["target"], 88)
    assert summary["kept_columns"] == [config["columns"][index] for index in summary["kept_inputs"]]
    assert len(summary["kept_columns"]) == 7
    assert "bmi" in summary["kept_columns"], "which every study of these patients finds"
    assert summary["r2"] > 0.2


def test_tables_of_every_format_are_read_alike(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "a.parquet")
    frame[:342].to_csv(tmp_path / "train.csv", index=False)
    frame[342:].to_parquet(tmp_path / "test.parquet")
    read = [read_table(tmp_path / name) for name in ("a.csv", "a.tsv", "a.parquet")]
    for other in read[1:]:
        assert torch.equal(other.train.images, read[0].train.images)
        assert torch.equal(other.test.labels, read[0].test.labels)
        assert other.columns == read[0].columns == tuple(frame.columns[:-1])
    parts = read_table(tmp_path)
    assert (len(parts.train), len(parts.test)) == (342, 100)
    assert np.allclose(parts.test.images.numpy(), frame.to_numpy(np.float32)[342:, :-1])
    assert np.allclose(parts.test.labels[:, 0].numpy(), frame["target"][342:])


def test_names_in_a_table(tmp_path: Path) -> None:
    """Columns and classes are named as in the file, without the spaces around them."""
    path = tmp_path / "a.csv"
    path.write_text("a , b,fit \n" + "1,2,True\n3,4,False \n" * 5)
    data = read_table(path)
    assert (data.columns, data.classes) == (("a", "b"), ("False", "True"))
    path.write_text("a,fit\n" + "1,True\n3,False\n" * 5)
    assert read_table(path).classes == ("False", "True")
    assert read_table(path, task="regression").train.labels.unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "labels", "said"),
    [
        ("a,b,a ,c\n1,2,3,0\n", (), "it has two columns 'a'"),
        ("a;b;c\n1,5;2;0\n", ("c",), "only one column, 'a;b;c'.*by commas"),
        ("a,c\n1,x\n2,NA\n", (), "marker of a missing one .NA, null, nan.*Rename a class"),
        ("a,b,c\n1,2,0\n", ("c", "c"), "names one column twice"),
    ],
)
def test_text_that_is_read_wrongly_if_at_all(text: str, labels: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        read_table(tmp_path / "a.csv", labels)


@pytest.mark.parametrize(
    ("frame", "options", "said"),
    [
        ({"a": [1, 2], "b": ["x", "y"], "c": [0, 1]}, [], "column 'b' holds 'x', which is not a number"),
        ({"a": [1, None, 3], "c": [0, 1, 1]}, [], "column 'a' has no value in row 2"),
        ({"a": [1, 2], "c": [0, None]}, [], "column 'c' has no value in row 2"),
        ({"a": [1, 2], "c": [0, 1]}, ["--label", "price"], "it has no column 'price'; it has 'a', 'c'"),
        ({"a": [1, 2], "c": [0, 1]}, ["--drop-columns", "a"], "no column is left to predict from"),
        ({"a": [1, 1e300], "c": [0, 1]}, [], "column 'a' is infinite or too large in row 2"),
        ({"a": [], "c": []}, [], "it has no rows"),
        ({"a": [1, 2, 3], "c": [1, 1, 1]}, [], "all labels are 1"),
        ({"a": [1, 2, 3], "c": ["x", "x", "x"]}, [], "all labels are x"),
    ],
)
def test_tables_that_do_not_fit(
    frame: dict[str, list[Any]],
    options: list[str],
    said: str,
    regressors: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "table.csv"
    pandas.DataFrame(frame).to_csv(path, index=False)
    assert main(["fit", f"{regressors}:ten", "--data", str(path), *options]) == 3
    assert said in capsys.readouterr().err


def test_damaged_parquet_is_told_by_one_error(
    regressors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    assert main(["fit", f"{regressors}:ten", "--data", str(path)]) == 3
    assert "it is not a table that pandas reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (np.arange(40) % 3, "classification"),
        (np.array(["b", "a"] * 20), "classification"),
        (np.arange(40) % 2 == 0, "classification"),
        (np.arange(40.0) % 4, "classification"),
        (np.arange(40.0), "regression"),
        (np.arange(40.0) % 4 + 1, "regression"),
        (np.arange(40) % 25, "regression"),
        (np.linspace(0, 1, 40), "regression"),
        (np.linspace(0, 1, 40).reshape(20, 2), "regression"),
        (np.arange(40).reshape(20, 2) % 3 > 0, "multi-label"),
    ],
)
def test_task_is_guessed_from_the_labels(labels: np.ndarray, task: str) -> None:
    read = read_labels(Path("labels"), labels, labels, None)
    assert read.task == task
    assert len(read.names) == (read.train.shape[1] if task != "classification" else len(np.unique(labels)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metric", "r2"], "--metric r2 is not for classification: choose one of accuracy, balanced-accuracy, f1"),
        (["--loss", "huber"], "--loss huber is not for classification"),
        (["--metric", "precision"], "--metric precision is not valid: choose one of accuracy"),
        (["--task", "ranking"], "--task ranking is not valid: choose one of classification, regression, multi-label"),
        (["--task", "regression"], "returns 3 values, but table has 1 targets ('y'): make its last layer 1 wide"),
        (["--class-weights", "1,2"], "--class-weights 1,2 does not name each class once"),
        (["--class-weights", "1,2,x"], "holds something other than numbers above 0"),
        (["--label", "y"], "--label and --drop-columns are for tables of named columns"),
    ],
)
def test_options_that_do_not_fit_the_labels(
    options: list[str], said: str, networks: Path, npz: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), *options]) == 2
    assert said in capsys.readouterr().err


def test_squared_errors_of_several_labels_are_refused(
    regressors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label counts as there above 0, and squared errors would train it to 1."""
    x, y = make_multilabel_classification(40, n_features=10, n_classes=5, random_state=0)
    data = write(tmp_path / "labels.npz", x.astype(np.float32), y, 30)
    assert main(["fit", f"{regressors}:five", "--data", str(data), "--loss", "mse"]) == 2
    assert "--loss mse is not for multi-label: choose one of bce" in capsys.readouterr().err


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if "classification" in metric.tasks])
@pytest.mark.parametrize("classes", [2, 3])
def test_scores_are_those_of_scikit_learn(metric: str, classes: int) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(60, classes), torch.arange(60) % classes
    outputs[torch.arange(60), labels] += 0.5
    scoring = Scoring("classification", find_metrics("classification", metric))
    network = nn.Identity()
    found = scoring(network, [(outputs[:25], labels[:25]), (outputs[25:], labels[25:])], LOSSES["cross-entropy"])
    probabilities, chosen = outputs.softmax(1).numpy(), outputs.argmax(1).numpy()
    given = probabilities[:, 1] if classes == 2 else probabilities
    wanted = {
        "accuracy": metrics.accuracy_score(labels, chosen),
        "balanced-accuracy": metrics.balanced_accuracy_score(labels, chosen),
        "f1": metrics.f1_score(labels, chosen, average="binary" if classes == 2 else "macro"),
        "auc": metrics.roc_auc_score(labels, given, multi_class="ovr"),
        "average-precision": metrics.average_precision_score(labels, given),
    }[metric]
    assert found.scores[metric] == pytest.approx(100 * wanted)
    assert found.scores["accuracy"] == pytest.approx(100 * metrics.accuracy_score(labels, chosen))
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), rel=1e-5)


@pytest.mark.parametrize("metric", [metric for name, metric in METRICS.items() if name != "accuracy"])
def test_outputs_that_are_not_finite_score_no_better_than_any(metric: Metric) -> None:
    labels = torch.tensor([[0.0], [1.0]]) if "regression" in metric.tasks else torch.tensor([0, 1])
    far = torch.tensor([[1e3], [-1e3]]) if "regression" in metric.tasks else torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    scoring = Scoring(metric.tasks[0], find_metrics(metric.tasks[0], metric.name))
    broken, bad = (
        scoring(nn.Identity(), [(outputs, labels)], LOSSES["mse"]).scores[metric.name]
        for outputs in (torch.full_like(far, torch.nan), far)
    )
    assert metric.at_least_as_good(bad, broken)


def test_score_without_an_example_of_every_class_is_refused(networks: Path, tmp_path: Path) -> None:
    x, y = table(240, 0)
    data = tmp_path / "table.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[y < 2], y_test=y[y < 2])
    config = make_fit_config(f"{networks}:mlp", data, metric="auc")
    with pytest.raises(ValueError, match="the test examples have no example of '2', or no other example, and AUC"):
        make_own_recipe(config, load_own_data(config))


def test_balanced_weights_make_every_class_count_alike(npz: Path, networks: Path) -> None:
    data = load_own_data(make_fit_config(f"{networks}:mlp", npz))
    rare = data.train.select(torch.cat([(data.train.labels > 0).nonzero()[:, 0], torch.tensor([0, 3])]))
    data = replace(data, train=rare)
    weights = class_weights("balanced", data)
    counts = torch.bincount(rare.labels)
    torch.testing.assert_close(weights * counts, torch.full((3,), len(rare) / 3))
    named = class_weights("2=1,0=4,1=1", data)
    assert float(named[0] / named[1]) == pytest.approx(4)
    assert float((named * counts).sum()) == pytest.approx(len(rare))
    outputs = torch.randn(len(rare), 3)
    weighted = LOSSES["cross-entropy"](outputs, rare.labels, weights=weights)
    own = nn.CrossEntropyLoss(weights, reduction="sum")(outputs, rare.labels) / len(rare)
    assert float(weighted) == pytest.approx(float(own), rel=1e-5)


def test_balanced_weights_find_the_rare_class(networks: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(1200, 12)).astype(np.float32)
    y = (x[:, 0] + 0.7 * random.normal(size=1200) > 2).astype(np.int64)
    y[[0, 1, -1]] = 2
    data = write(tmp_path / "rare.npz", x, y, 800)
    found = {}
    for weights in ([], ["--class-weights", "balanced"]):
        out = tmp_path / f"run{len(weights)}"
        command = ["fit", f"{networks}:mlp", "--data", str(data), "--out", str(out), "--metric", "balanced-accuracy"]
        assert main([*command, *QUICK, "--epochs", "8", "--no-prune", *weights]) == 0
        found[len(weights)] = RunFolder(out).read_json("summary")["balanced-accuracy"]
    assert found[2] > found[0] + 5


def test_two_targets(regressors: Path, tmp_path: Path) -> None:
    x, y = make_friedman1(300, random_state=0)
    data, out = write(tmp_path / "two.npz", x.astype(np.float32), np.stack([y, 10 - 3 * y], 1), 240), tmp_path / "run"
    command = ["fit", f"{regressors}:pair", "--data", str(data), "--out", str(out)]
    assert main([*command, *QUICK, "--epochs", "6"]) == 0
    model = rlsprune.load(out / "model.safetensors", into=nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    with torch.no_grad():
        outputs = model.eval()(torch.from_numpy(x[240:].astype(np.float32))).numpy()
    wanted = metrics.r2_score(np.stack([y, 10 - 3 * y], 1)[240:], outputs)
    assert RunFolder(out).read_json("summary")["r2"] == pytest.approx(wanted, abs=1e-4)
