"""`rlsprune fit`: from a user's function and data to a smaller network that onnxruntime runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rlsprune
from app.fit.conftest import table, write_images
from rlsprune.app.cli.main import main
from rlsprune.app.config.fit import FitConfig, make_fit_config
from rlsprune.app.config.settings import OURS
from rlsprune.app.fit.fit import fit as run_fit
from rlsprune.app.fit.fit import load_own_data, make_own_recipe
from rlsprune.app.fit.model import load_weights
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer

QUICK = ["--epochs", "4", "--warmup-epochs", "0", "--threads", "1", "--quiet"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))


def run_onnx(path: Path, inputs: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: inputs})[0])


@pytest.mark.parametrize("optimizer", ["rls", "adamw"])
def test_table_ends_as_a_smaller_network_that_onnxruntime_runs(
    optimizer: str, networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), "--optimizer", optimizer]
    assert main([*command, *QUICK, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary == RunFolder(out).read_json("summary")
    assert summary["weights_percent"] < 100
    small = rlsprune.load(out / "model.safetensors", into=mlp()).eval()
    inputs, labels = table(60, 1)
    outputs = run_onnx(out / "model.onnx", inputs)
    with torch.no_grad():
        assert np.allclose(outputs, small(torch.from_numpy(inputs)).numpy(), atol=1e-5)
    assert 100 * np.mean(outputs.argmax(1) == labels) == pytest.approx(summary["accuracy"])
    assert run_onnx(out / "model.onnx", inputs[:1]).shape == (1, 3)
    assert RunFolder(out).read_json("config")["classes"] == ["0", "1", "2"]
    assert "networks.py:mlp" in (out / "report.html").read_text()


def test_unpruned_network_is_trained_beside_it(networks: Path, npz: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), "--baseline"]
    assert main([*command, *QUICK]) == 0
    folder, beside = RunFolder(out), RunFolder(out / "unpruned")
    assert beside.read_json("summary")["weights_percent"] == 100
    assert beside.read_json("config")["images"] == [240, 60], "nothing is held out for a gate"
    told = folder.read_json("summary")["unpruned_accuracy"]
    assert told == beside.read_json("summary")["accuracy"]
    assert f"{told:.2f} % unpruned, trained alike" in (out / "report.html").read_text()


def test_interrupted_baseline_is_resumed(networks: Path, npz: Path, tmp_path: Path) -> None:
    class Interrupting(Observer):
        def batch(self, number: int, loss: torch.Tensor) -> None:
            raise KeyboardInterrupt

    config = make_fit_config(f"{networks}:mlp", npz, epochs=2, warmup_epochs=0, baseline=True)
    with pytest.raises(KeyboardInterrupt):
        run_fit(config, RunFolder(tmp_path / "run"), baseline_observer=Interrupting)
    assert "unpruned_accuracy" not in RunFolder(tmp_path / "run").read_json("summary")
    assert main(["fit", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert "unpruned_accuracy" in RunFolder(tmp_path / "run").read_json("summary")
    assert "trained alike" in (tmp_path / "run" / "report.html").read_text()


def test_baseline_of_nothing_is_refused(networks: Path, npz: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), "--baseline", "--no-prune"]) == 2
    assert "leave out --no-prune" in capsys.readouterr().err


@pytest.fixture
def unscaled(tmp_path: Path) -> Path:
    """The same table as `npz`, in the units that a user has: the columns differ by five orders of magnitude."""
    path = tmp_path / "unscaled.npz"
    (x_train, y_train), (x_test, y_test) = table(240, 0), table(60, 1)
    units, offsets = np.logspace(-1, 4, 12, dtype=np.float32), np.float32(20)
    np.savez(
        path, x_train=(x_train + offsets) * units, y_train=y_train, x_test=(x_test + offsets) * units, y_test=y_test
    )
    return path


def test_unscaled_columns_are_learnt_and_the_files_take_them_unscaled(
    networks: Path, npz: Path, unscaled: Path, tmp_path: Path
) -> None:
    for name, data in (("scaled", npz), ("unscaled", unscaled)):
        command = ["fit", f"{networks}:mlp", "--data", str(data), "--out", str(tmp_path / name)]
        assert main([*command, *QUICK, "--epochs", "12"]) == 0
    scaled, out = (RunFolder(tmp_path / name) for name in ("scaled", "unscaled"))
    summary = out.read_json("summary")
    assert summary["accuracy"] == pytest.approx(scaled.read_json("summary")["accuracy"], abs=5)
    assert summary["accuracy"] > 50, "of three classes"
    assert summary["weights_percent"] < 50

    with np.load(unscaled) as arrays:
        inputs, labels = arrays["x_test"], arrays["y_test"]
    small = rlsprune.load(out.model, into=mlp()).eval()
    with torch.no_grad():
        outputs = small(torch.from_numpy(inputs)).numpy()
    assert 100 * np.mean(outputs.argmax(1) == labels) == pytest.approx(summary["accuracy"])
    assert np.allclose(run_onnx(out.path / "model.onnx", inputs), outputs, atol=1e-3)


def test_given_weights_mean_the_same_on_scaled_columns(networks: Path, unscaled: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.safetensors"
    torch.manual_seed(3)
    network = mlp()
    save_file(network.state_dict(), given)
    config = make_fit_config(f"{networks}:mlp", unscaled, weights=given)
    loaded = load_own_data(config)
    recipe = make_own_recipe(config, loaded)
    model = recipe.build_model()
    recipe.prepare(model)
    assert float(recipe.data.train.images.std()) == pytest.approx(1, abs=0.01)
    with torch.no_grad():
        wanted = network(loaded.test.images)
        error = (model(recipe.data.test.images) - wanted).abs().max() / wanted.abs().max()
        back = (recipe.delivered(model)(loaded.test.images) - wanted).abs().max() / wanted.abs().max()
    assert float(error) < 1e-4
    assert float(back) < 1e-4


def test_only_what_linear_layers_read_alone_is_scaled(networks: Path, unscaled: Path) -> None:
    def trained_on(name: str, **options: Any) -> torch.Tensor:
        config = make_fit_config(f"{networks}:{name}", unscaled, **options)
        return make_own_recipe(config, load_own_data(config)).data.train.images

    raw = trained_on("mlp", standardise=False)
    assert torch.equal(trained_on("Residual"), raw), "a shortcut reads the columns too"
    assert torch.equal(trained_on("rigid"), raw), "a layer norm reads them"
    scaled = trained_on("no_bias")
    assert torch.allclose(scaled.square().mean(0), torch.ones(12), rtol=1e-4)
    assert float(scaled.mean()) > 0.9, "without a bias nothing could take the mean over"


@pytest.mark.parametrize("split", [False, True])
def test_folder_of_images(split: bool, networks: Path, tmp_path: Path) -> None:
    if split:
        write_images(tmp_path / "photos" / "train", 12)
        write_images(tmp_path / "photos" / "test", 4)
    else:
        write_images(tmp_path / "photos", 15)
    out = tmp_path / "run"
    command = ["fit", f"{networks}:cnn", "--data", str(tmp_path / "photos"), "--out", str(out), "--batch-size", "8"]
    assert main([*command, *QUICK]) == 0
    config = RunFolder(out).read_json("config")
    assert config["classes"] == ["dark", "light", "middle"]
    assert config["images"] == [32, 12 if split else 9]  # 33 but for a batch of one
    assert run_onnx(out / "model.onnx", np.zeros((5, 1, 8, 8), np.float32)).shape == (5, 3)


KILLED = """
import os, signal, sys
from rlsprune.app.config.fit import make_fit_config
from rlsprune.app.fit.fit import fit
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer

class Killer(Observer):
    done = 0
    def epoch(self, metrics, counts):
        self.done = metrics["epoch"]
    def batch(self, number, loss):
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

options = {{'epochs': 4, 'warmup_epochs': 0, 'average': 0.5}}
fit(make_fit_config({model!r}, {data!r}, **options), RunFolder({folder!r}), Killer())
"""


def test_killed_run_is_resumed_to_the_same_weights(networks: Path, npz: Path, tmp_path: Path) -> None:
    model, whole, broken = f"{networks}:mlp", tmp_path / "whole", tmp_path / "broken"
    options = ["--average", "0.5", *QUICK]
    assert main(["fit", model, "--data", str(npz), "--out", str(whole), *options]) == 0
    script = KILLED.format(model=model, data=str(npz), folder=str(broken))
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert killed.returncode < 0, killed.stderr
    assert not (broken / "model.safetensors").exists()
    assert main(["fit", "--resume", str(broken), "--quiet"]) == 0
    ours, theirs = load_file(whole / "model.safetensors"), load_file(broken / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert RunFolder(broken).read_lines("events") == RunFolder(whole).read_lines("events")
    assert (broken / "model.onnx").is_file()


def test_changed_data_are_not_gone_on_with(
    networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(make_fit_config(f"{networks}:mlp", npz), classes=("0", "1", "2"), images=(220, 61))
    RunFolder(tmp_path / "run").write_json("config", config.to_dict())
    assert main(["fit", "--resume", str(tmp_path / "run"), "--quiet"]) == 3
    assert "changed since" in capsys.readouterr().err
    assert load_own_data(replace(config, images=(220, 60))).classes == ("0", "1", "2")


@pytest.mark.parametrize("kind", ["rlsprune", "safetensors", "pt", "checkpoint.pt"])
def test_weights_are_read_from_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    source, model = mlp(), mlp()
    path = tmp_path / f"given.{kind.replace('rlsprune', 'safetensors')}"
    if kind == "rlsprune":
        rlsprune.save(source, path)
    elif kind == "safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save(source.state_dict() if kind == "pt" else {"state_dict": source.state_dict(), "epoch": 3}, path)
    load_weights(model, path)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), source.parameters(), strict=True))


@pytest.mark.slow
def test_run_starts_from_the_weights_it_is_given(networks: Path, npz: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    source, path, out = mlp(), tmp_path / "given.pt", tmp_path / "run"
    torch.save(source.state_dict(), path)
    # At such a learning rate the weights stay what they were.
    options = ["--weights", str(path), "--no-prune", "--lr", "1e-12", "--optimizer", "adamw", "--epochs", "1"]
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), *options, "--quiet"]) == 0
    for name, tensor in source.state_dict().items():
        assert torch.allclose(load_file(out / "model.safetensors")[name], tensor, atol=1e-6)


def test_accuracy_of_the_given_weights_is_told(networks: Path, npz: Path, tmp_path: Path) -> None:
    """The classes differ in one feature each: these weights find nearly all of them."""
    model, path = mlp(), tmp_path / "given.pt"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for label in range(3):
            model[0].weight[label, label] = model[2].weight[label, label] = 1
    torch.save(model.state_dict(), path)
    config = make_fit_config(f"{networks}:mlp", npz, weights=path)
    inputs, labels = table(60, 1)
    found = 100 * np.mean(inputs[:, :3].argmax(1) == labels)
    assert make_own_recipe(config, load_own_data(config)).title["given_accuracy"] == pytest.approx(found)
    plain = replace(config, weights=None)
    assert "given_accuracy" not in make_own_recipe(plain, load_own_data(plain)).title


@pytest.mark.parametrize(("given", "rate"), [(None, 0.1), (0.7, 0.7)])
def test_batch_norm_is_trained_at_the_lower_rate_unless_another_is_given(
    given: float | None, rate: float, networks: Path, tmp_path: Path
) -> None:
    write_images(tmp_path / "photos", 5)
    config = make_fit_config(f"{networks}:cnn", tmp_path / "photos", lr=given)
    assert make_own_recipe(config, load_own_data(config)).config["lr"] == rate


def test_network_without_batch_norm_is_trained_faster(networks: Path, npz: Path) -> None:
    config = make_fit_config(f"{networks}:mlp", npz)
    recipe = make_own_recipe(config, load_own_data(config))
    assert recipe.config["lr"] == 0.3
    assert recipe.build_optimizer(mlp()).param_groups[0]["lr"] == 0.3


def test_allocating_needs_a_held_out_loss(npz: Path) -> None:
    assert make_fit_config("m:f", npz).pruning.allocate
    assert not make_fit_config("m:f", npz, allocate=False).pruning.allocate
    assert not make_fit_config("m:f", npz, gate="train").pruning.allocate
    assert not make_fit_config("m:f", npz, max_drop=1.0).pruning.allocate
    with pytest.raises(ValueError, match="--gate train is not valid: it must be valid with --allocate"):
        make_fit_config("m:f", npz, allocate=True, gate="train")


def test_tolerance_is_that_of_the_experiments_unless_another_is_given(npz: Path) -> None:
    assert make_fit_config("m:f", npz).pruning.tolerance == OURS.tolerance
    assert make_fit_config("m:f", npz, tolerance=0.3).pruning.tolerance == 0.3


def test_config_comes_back_from_json(npz: Path) -> None:
    config = make_fit_config("nets:mlp", npz, weights="w.pt", optimizer="adamw", image_size=32)
    assert FitConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, *said: str) -> None:
    assert main(["fit", *arguments]) == code
    error = capsys.readouterr().err
    for words in said:
        assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("mlp", "module:function"),
        ("no_such_module:mlp", "there is no module 'no_such_module'"),
        ("{folder}/none.py:mlp", "there is no file"),
        ("{networks}:lstm", "has no 'lstm': it has mlp, cnn"),
        ("{networks}:width", "is a int, not a function"),
        ("{networks}:nothing", "returned a NoneType"),
        ("{networks}:of_width", "cannot be called without arguments"),
        ("{networks}:wide", "returns 7 values, but table has 3 classes"),
        ("{networks}:cnn", "does not take the data of table, 12 each"),
    ],
)
def test_models_that_do_not_fit(
    model: str, said: str, networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = model.format(networks=networks, folder=tmp_path)
    fails(capsys, [spec, "--data", str(npz), "--out", str(tmp_path / "run"), *QUICK], 2, said)
    assert not (tmp_path / "run").exists()


def test_network_that_cannot_be_pruned_leaves_no_run_behind(
    networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(npz), "--out", str(tmp_path / "run"), *QUICK]
    fails(capsys, [f"{networks}:rigid", *options], 2, "the model has nothing to prune")
    assert main(["fit", f"{networks}:mlp", *options]) == 0, "the folder is free for the next attempt"


def test_module_that_misses_a_module_says_which(tmp_path: Path, npz: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    fails(capsys, [f"{tmp_path}/broken.py:f", "--data", str(npz)], 1, "a_module_that_is_not_there")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"0.weight": torch.zeros(32, 12)}, "lacks '0.bias'"),
        ({**mlp().state_dict(), "3.weight": torch.zeros(1)}, "has '3.weight', which the model lacks"),
        ({**mlp().state_dict(), "2.bias": torch.zeros(9)}, "'2.bias' is (9,) in it and (3,) in the model"),
        ({"state": 3}, "something other than tensors"),
        (mlp(), "cannot be read without executing"),
    ],
)
def test_weights_that_do_not_fit(
    content: Any, said: str, networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given.pt"
    torch.save(content, path)
    options = ["--weights", str(path), "--out", str(tmp_path / "run"), *QUICK]
    fails(capsys, [f"{networks}:mlp", "--data", str(npz), *options], 2, said, str(path))
    assert not (tmp_path / "run").exists()


def test_interrupt_ends_with_the_command_that_resumes(
    networks: Path, npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlsprune.app.run.execute.Run.epoch", interrupted)
    assert main(["fit", f"{networks}:mlp", "--data", str(npz), "--out", str(out), *QUICK]) == 130
    assert f"rlsprune fit --resume {out}" in capsys.readouterr().err
    assert main(["run", "--resume", str(out)]) == 2
    assert f"rlsprune fit --resume {out}" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["fit", "--resume", str(out), "--quiet"]) == 0
    (out / "model.onnx").unlink()
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert main(["fit", "--resume", str(out), "--quiet"]) == 0
    assert (out / "model.onnx").is_file(), "a finished run gets what it lacks"
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    (out / "model.onnx").unlink()
    (out / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    assert main(["fit", "--resume", str(out), "--quiet"]) == 2
    assert not (tmp_path / "outside.onnx").exists(), "what a run writes stays in its folder"


def test_network_that_cannot_be_exported_keeps_the_result_of_its_training(
    networks: Path, npz: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["fit", f"{networks}:branching", "--data", str(npz), "--out", str(out), "--no-prune", "--json"]
    assert main([*command, "--epochs", "1", "--threads", "1"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == RunFolder(out).read_json("summary")
    assert said.err.startswith("No model.onnx was written: Branching cannot be exported")
    assert len(said.err.splitlines()) == 1
    assert "\x1b" not in said.err
    assert (out / "report.html").is_file()
    assert not (out / "model.onnx").exists()


def test_file_that_is_not_there_is_not_said_to_be_one_of_the_catalogue(
    networks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (
        ("none.npz", "numpy.savez"),
        ("photos", "Give a folder of images, a .csv, .parquet or .npz file"),
    ):
        assert main(["fit", f"{networks}:mlp", "--data", str(tmp_path / name)]) == 3
        error = capsys.readouterr().err
        assert f"{name}': there is no such file" in error
        assert said in error
        assert "data get" not in error


@pytest.mark.filterwarnings("ignore:nothing was ever pruned")
def test_run_of_a_device_that_is_not_here_goes_on_with_another(
    networks: Path, npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    config = make_fit_config(f"{networks}:mlp", npz, epochs=1, device="cuda:99")
    folder.write_json("config", config.to_dict())
    fails(capsys, ["--resume", str(folder.path)], 2, "--device cuda:99 cannot be used here", "such as cpu")
    command = ["fit", "--resume", str(folder.path), "--device", "cpu", "--on-fault", "skip", "--quiet"]
    assert main(command) == 0
    assert folder.finished
    written = folder.read_json("config")
    assert (written["device"], written["on_fault"]) == ("cpu", "skip")


def test_faults_and_determinism_are_the_recipes(npz: Path, networks: Path) -> None:
    config = make_fit_config(f"{networks}:mlp", npz, on_fault="rollback", deterministic=True)
    recipe = make_own_recipe(config, load_own_data(config))
    assert (recipe.on_fault, recipe.deterministic) == ("rollback", True)
    old = {name: value for name, value in config.to_dict().items() if name not in ("on_fault", "deterministic")}
    assert FitConfig.from_dict(old) == replace(config, on_fault="raise", deterministic=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["m:f", "--data", "d.npz", "--on-fault", "shrug"], "--on-fault shrug"),
        ([], "give a model and --data"),
        (["--resume", "x", "--epochs", "3"], "leave out epochs"),
        (["m:f", "--data", "d.npz", "--target", "1.5"], "--target 1.5"),
        (["m:f", "--data", "d.npz", "--tolerance", "nan"], "--tolerance nan"),
        (["m:f", "--data", "d.npz", "--ratio", "0"], "--ratio 0"),
        (["m:f", "--data", "d.npz", "--optimizer", "lion"], "--optimizer lion"),
        (["m:f", "--data", "d.npz", "--channels", "2"], "--channels 2"),
        (["m:f", "--data", "d.npz", "--average", "-1"], "--average -1"),
    ],
)
def test_options_that_make_no_sense(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, options, 2, said)
