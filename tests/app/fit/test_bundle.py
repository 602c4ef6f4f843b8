"""What `rlsprune fit` delivers beside the model: ONNX files that know their inputs, and predict.py."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas
import pytest
import torch
from PIL import Image
from sklearn.datasets import make_friedman1, make_multilabel_classification
from torch.utils.data import DataLoader

from app.fit.conftest import table, write_images
from app.fit.test_fit import QUICK, run_onnx
from rlsprune.app.cli.main import main
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.objects import read_objects
from rlsprune.app.fit.model import find_function
from rlsprune.app.run.folder import RunFolder

ALONE = """
import json, runpy, sys
for name in ("torch", "rlsprune", "onnx", "pandas", "sklearn"):
    sys.modules[name] = None  # importing it fails
sys.path.insert(0, {folder!r})
from predict import Model
print(json.dumps(Model({model!r}).predict({inputs!r})))
"""


def predict(folder: Path, inputs: Any, model: str = "model.onnx") -> list[dict[str, Any]]:
    """What predict.py says in a process that has onnxruntime alone."""
    code = ALONE.format(folder=str(folder), model=model, inputs=inputs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def metadata(path: Path) -> dict[str, str]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map


def test_table_of_names_is_predicted_by_onnxruntime_alone(networks: Path, tmp_path: Path) -> None:
    features, labels = table(240, 0)
    names = [f"feature {number}" for number in range(12)]
    frame = pandas.DataFrame(features, columns=names)
    frame["kind"] = np.array(["ash", "birch", "cherry"])[labels]
    frame.to_csv(tmp_path / "trees.csv", index=False)
    out = tmp_path / "run"
    arguments = ["fit", f"{networks}:mlp", "--data", str(tmp_path / "trees.csv"), "--label", "kind", "--int8"]
    assert main([*arguments, *QUICK, "--out", str(out)]) == 0
    told = metadata(out / "model.onnx")
    assert json.loads(told["classes"]) == ["ash", "birch", "cherry"]
    assert json.loads(told["columns"]) == names
    assert told["divide_by"] == "1"
    assert metadata(out / "model-int8.onnx").items() >= told.items()
    outputs = run_onnx(out / "model.onnx", features)
    wanted = [["ash", "birch", "cherry"][index] for index in outputs.argmax(1)]
    chances = torch.from_numpy(outputs).softmax(1).amax(1)
    found = predict(out, str(tmp_path / "trees.csv"))
    assert [row["label"] for row in found] == wanted
    assert [row["probability"] for row in found] == pytest.approx(chances.tolist(), abs=1e-5)
    read = json.loads(told["inputs_read"])
    assert len(read) < 12, "inputs were pruned, and the others need not be there"
    rows = [{names[index]: float(value) for index, value in enumerate(row) if index in read} for row in features[:5]]
    assert [row["label"] for row in predict(out, rows)] == wanted[:5]
    done = subprocess.run(
        [sys.executable, str(out / "predict.py"), str(tmp_path / "trees.csv")], capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[0].split("\t")[1])["label"] == wanted[0]


def test_classes_of_squared_errors_have_no_probability(networks: Path, npz: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), "--loss", "mse", "--no-prune"]
    assert main([*arguments, *QUICK]) == 0
    features, _ = table(4, 1)
    chosen = run_onnx(out / "model.onnx", features).argmax(1)
    assert predict(out, features.tolist()) == [{"label": str(index)} for index in chosen]


def test_predict_takes_what_training_took_and_tells_the_rest_in_a_line(
    networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    features, labels = table(120, 0)
    frame = pandas.DataFrame(features, columns=[f"f{number}" for number in range(12)])
    frame["f0"] = features[:, 0] > 0.5
    frame["kind"] = labels
    rows, out = tmp_path / "rows.tsv", tmp_path / "run"
    frame.to_csv(rows, index=False, sep="\t")
    arguments = ["fit", f"{networks}:mlp", "--data", str(rows), *QUICK, "--no-prune", "--out", str(out)]
    assert main(arguments) == 0
    capsys.readouterr()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.onnx").write_text("another model")
    monkeypatch.chdir(elsewhere)
    predict = runpy.run_path(str(out / "predict.py"))["main"]
    assert predict([str(rows)]) == 0
    found = [json.loads(line.split("\t")[1])["label"] for line in capsys.readouterr().out.splitlines()]
    outputs = run_onnx(out / "model.onnx", frame.to_numpy(np.float32)[:, :12])
    assert found == [str(index) for index in outputs.argmax(1)]
    head = ",".join(frame.columns)
    texts = {
        "nan": (f"{head}\n{','.join(['nan'] * 13)}\n", "row 1 has 'nan' in column 'f0'"),
        "large": (f"{head}\n{','.join(['1e300'] * 13)}\n", "row 1 has '1e300' in column 'f0'"),
        "short": (f"{head}\n1\n", "row 1 has None in column 'f1'"),
        "empty": ("", "it has no rows"),
        "names": (f"{head}\n", "it has no rows"),
        "missing": (None, "No such file"),
    }
    for name, (text, said) in texts.items():
        if text is not None:
            Path(f"{name}.csv").write_text(text)
        assert predict([f"{name}.csv"]) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"{name}.csv: {said}")
        assert told.err.count("\n") == 1
    assert predict(["--help"]) == 0
    assert "python predict.py" in capsys.readouterr().out
    assert predict([]) == 2
    assert "python predict.py" in capsys.readouterr().err
    assert predict([str(tmp_path)]) == 1
    assert "not images" in capsys.readouterr().err
    (out / "model.onnx").unlink()
    assert predict([str(rows)]) == 1
    assert "there is no" in capsys.readouterr().err


def test_score_of_the_8_bit_model_is_measured(networks: Path, npz: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), *QUICK]
    assert main([*arguments, "--int8"]) == 0
    features, labels = table(60, 1)
    right = run_onnx(out / "model-int8.onnx", features).argmax(1) == labels
    assert RunFolder(out).read_summary()["int8_accuracy"] == pytest.approx(100 * right.mean())
    assert (out / "model-int8.onnx").read_bytes() != (out / "model.onnx").read_bytes()
    for name in ("predict.py", "model.onnx", "model-int8.onnx"):
        (out / name).unlink()
    assert main(["fit", "--resume", str(out), "--quiet"]) == 0, "what is missing is written again"
    for name in ("predict.py", "model.onnx", "model-int8.onnx"):
        assert (out / name).is_file()


def test_check_finds_damage_to_what_is_delivered(
    networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), *QUICK, "--int8"]) == 0
    assert main(["check", str(out)]) == 0
    for name in ("predict.py", "model.onnx", "model-int8.onnx"):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        capsys.readouterr()
        assert main(["check", str(out)]) == 2
        wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
        assert len(wrong) == 1
        assert name in wrong[0]
        assert "does not match its checksum" in wrong[0]
        (out / name).unlink()
        assert main(["check", str(out)]) == 2
        assert "it is missing or not a regular file" in capsys.readouterr().out
        (out / name).write_bytes(whole)
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps({**summary, "sha256": ["model.onnx"]}))
    assert main(["check", str(out)]) == 2
    assert "is not an object" in capsys.readouterr().out


def test_8_bits_tell_numbers_apart_that_are_far_above_their_deviation(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def one():\n    layers = [nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]\n"
        "    return nn.Sequential(*layers)\n"
    )
    x, y = make_friedman1(600, random_state=0)
    x, y = np.float32(x), 2010 + 3.5 * (y - y.mean()) / y.std()
    np.savez(tmp_path / "years.npz", x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:])
    out = tmp_path / "run"
    arguments = ["fit", f"{tmp_path}/nets.py:one", "--data", str(tmp_path / "years.npz"), "--out", str(out), "--int8"]
    assert main([*arguments, *QUICK, "--epochs", "6", "--no-prune"]) == 0
    summary = RunFolder(out).read_summary()
    assert summary["r2"] > 0.7
    assert summary["int8_r2"] > summary["r2"] - 0.03
    assert b"DequantizeLinear" in (out / "model-int8.onnx").read_bytes(), "the other layers are in 8 bits"


def test_images_are_predicted_as_they_were_trained_on(networks: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 12)
    out = tmp_path / "run"
    assert main(["fit", f"{networks}:cnn", "--data", str(tmp_path / "photos"), *QUICK, "--out", str(out)]) == 0
    files = sorted((tmp_path / "photos").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file), np.float32)[None] / 255 for file in files])
    outputs = run_onnx(out / "model.onnx", pixels)
    found = predict(out, [str(file) for file in files])
    names = ("dark", "light", "middle")
    assert [row["label"] for row in found] == [names[index] for index in outputs.argmax(1)]
    assert metadata(out / "model.onnx")["divide_by"] == "255"


def test_numbers_and_several_labels(tmp_path: Path) -> None:
    nets = tmp_path / "nets.py"
    nets.write_text(
        "from torch import nn\n"
        "def one():\n    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))\n"
        "def five():\n    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))\n"
    )
    x, y = make_friedman1(200, random_state=0)
    np.savez(tmp_path / "numbers.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    several, marks = make_multilabel_classification(200, 10, n_classes=5, random_state=0)
    parts = {"x_train": several[:150], "y_train": marks[:150], "x_test": several[150:], "y_test": marks[150:]}
    np.savez(tmp_path / "labels.npz", **parts)
    for name, data in (("one", "numbers"), ("five", "labels")):
        arguments = ["fit", f"{nets}:{name}", "--data", str(tmp_path / f"{data}.npz"), "--out", str(tmp_path / name)]
        assert main([*arguments, *QUICK, "--no-prune"]) == 0
    rows = np.float32(x[:4])
    outputs = run_onnx(tmp_path / "one" / "model.onnx", rows)
    assert [row["y"] for row in predict(tmp_path / "one", rows.tolist())] == pytest.approx(outputs[:, 0].tolist())
    rows = np.float32(several[:4])
    outputs = run_onnx(tmp_path / "five" / "model.onnx", rows)
    found = predict(tmp_path / "five", rows.tolist())
    assert [row["labels"] for row in found] == [[str(i) for i in range(5) if row[i] > 0] for row in outputs]


def test_own_datasets(networks: Path, tmp_path: Path) -> None:
    """As torch has them, with the names of the classes as torchvision has them."""
    (tmp_path / "my_data.py").write_text(
        "import torch\n"
        "from torch.utils.data import Dataset\n"
        "class Kinds(Dataset):\n"
        "    classes = ('a', 'b', 'c')\n"
        "    def __init__(self, count):\n"
        "        self.x = torch.rand(count, 12, generator=torch.Generator().manual_seed(count))\n"
        "    def __len__(self):\n        return len(self.x)\n"
        "    def __getitem__(self, index):\n        return self.x[index], int(self.x[index, :3].argmax())\n"
        "def datasets():\n    return Kinds(240), Kinds(60)\n"
        "def one():\n    return Kinds(300)\n"
    )
    out, function = tmp_path / "run", f"{tmp_path}/my_data.py:one"
    assert main(["fit", f"{networks}:mlp", "--data", f"{tmp_path}/my_data.py:datasets", "--out", str(out), *QUICK]) == 0
    assert RunFolder(out).read_json("config")["images"][1] == 60
    assert json.loads(metadata(out / "model.onnx")["classes"]) == ["a", "b", "c"]
    assert main(["fit", "--resume", str(out), "--quiet"]) == 0
    one = read_objects(function, find_function(function, str(tmp_path)))
    assert (len(one.train), len(one.test)) == (240, 60), "a fifth is set aside"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "int without examples"),
        ([[1, 2, 3]] * 3, "3 data sets"),
        ([[torch.rand(3)]], "example 0 is a Tensor, not a pair"),
        ([[(torch.rand(3), 0), (torch.rand(4), 1)]], "example 1 is torch.float32 of .4,."),
        ([[(torch.full((3,), torch.nan), 0)]], "not all finite"),
        (DataLoader([(torch.rand(3), 0)]), "example 0 of its DataLoader cannot be read .TypeError"),
        ([{"a": 1}], "example 0 of its dict cannot be read .KeyError"),
        ([[(Image.new("L", (2, 2)), 0)]], "example 0 is of Image and int, not of numbers"),
        ([[(torch.rand(3), [0, [1, 2]])]], "example 0 is of Tensor and list, not of numbers"),
        ([[(torch.rand(3), [0, 1]), (torch.rand(3), [0, 1, 1])]], "label of example 1 has shape .3,."),
    ],
)
def test_datasets_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_objects("mine:data", lambda: given)
