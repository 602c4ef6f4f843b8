"""Every method from the command line to the files of its run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.experiments.figures import draw_pixels
from rlsprune.app.experiments.methods import take_shape
from rlsprune.app.experiments.recipe import load_data, run
from rlsprune.app.experiments.registry import METHODS, experiment
from rlsprune.app.models import ResNet
from rlsprune.app.run.counting import count_retained
from rlsprune.app.run.folder import RunFolder
from rlsprune.io import modelfile
from rlsprune.training.loop import evaluate

OPTIONS = ["--epochs", "3", "--warmup-epochs", "1", "--train-images", "300", "--test-images", "100", "--threads", "1"]
METRICS = {
    "epoch",
    "train_loss",
    "test_loss",
    "accuracy",
    "nodes_percent",
    "weights_percent",
    "flops_percent",
    "seconds",
}
# What the settings alone determine, as in Table 1: nodes and weights retained.
DETERMINED = {
    "l1-norm": (53.8, 21.7),
    "depgraph": (53.8, 21.7),
    "random": (53.8, 21.7),
    "soft-pruning": (100.0, 70.0),
    "weight-level": (100.0, 30.0),
    "none": (100.0, 100.0),
}


@pytest.mark.parametrize("method", METHODS)
def test_method_runs_from_the_command_line(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "digits-fnn", "--method", method, *OPTIONS, "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = RunFolder(out)
    metrics, events = folder.read_lines("metrics"), folder.read_lines("events")
    assert summary == folder.read_json("summary")
    assert [line["epoch"] for line in metrics] == [1, 2, 3]
    assert all(set(line) >= METRICS for line in metrics)
    assert (out / "environment.json").is_file()
    assert (out / "config.json").is_file()
    assert summary["accuracy"] == metrics[-1]["accuracy"]
    if method in DETERMINED:
        shares = (summary["nodes_percent"], summary["weights_percent"])
        assert shares == pytest.approx(DETERMINED[method], abs=0.05)
    if method in ("none", "scratch"):
        assert events == []
    else:
        assert events
        assert all(event["epoch"] >= 2 or method == "soft-pruning" for event in events)
    _check_model(folder, summary, metrics[-1])


def _check_model(folder: RunFolder, summary: dict[str, Any], last: dict[str, Any]) -> None:
    """The model in the file is the one that the figures are about."""
    method = summary["method"]
    model = experiment("digits-fnn").build(batch_norm=method == "net-slimming")
    modelfile.load(folder.model, into=model)
    counts = count_retained(model, torch.zeros(1, 784), zeros=False)
    assert [(layer["name"], layer["nodes"]) for layer in summary["layers"]] == [
        (name, count.nodes) for name, count in counts.items()
    ]
    assert [layer["weights"] for layer in summary["layers"]] == [count.weights for count in counts.values()]
    test = load_data(make_config("digits-fnn", train_images=300, test_images=100)).test
    result = evaluate(model, [(test.images.flatten(1) / 255, test.labels)], mean_squared_error)
    assert result.accuracy == last["accuracy"]
    assert result.loss == pytest.approx(last["test_loss"], rel=1e-4)


def test_scratch_has_the_shape_and_the_pixels_of_rls_and_other_weights(tmp_path: Path, tiny: dict[str, Any]) -> None:
    options = {**tiny, "epochs": 2, "warmup_epochs": 1}
    source, fresh = RunFolder(tmp_path / "rls"), RunFolder(tmp_path / "scratch")
    shape = run(make_config("digits-fnn", "rls-paper", **options), source)
    arguments = ["--epochs", "1", "--threads", "1", "--train-images", "300", "--quiet"]
    command = ["run", "--method", "scratch", "--from", str(source.path), "--out", str(fresh.path)]
    assert main([*command, *arguments]) == 0
    summary = fresh.read_json("summary")
    assert [layer["nodes"] for layer in summary["layers"]] == [layer["nodes"] for layer in shape["layers"]]
    assert summary["kept_inputs"] == shape["kept_inputs"]
    assert summary["weights_percent"] < 100
    models = [modelfile.load(folder.model, into=experiment("digits-fnn").build()) for folder in (source, fresh)]
    assert not torch.equal(models[0].get_parameter("fc2.weight"), models[1].get_parameter("fc2.weight"))


@pytest.mark.parametrize(("target", "missed"), [("0.01", 0.01), ("0.9", None)])
def test_a_target_that_is_missed_is_told(
    target: str, missed: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "digits-fnn", "--target", target, "--epochs", "2", "--warmup-epochs", "0", "--threads", "1"]
    command += ["--train-images", "300", "--test-images", "100", "--batch-size", "5000", "--tolerance", "9"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    summary = RunFolder(tmp_path).read_json("summary")
    assert summary["missed_target"] == missed
    assert ("1 % of the parameters, is not reached" in capsys.readouterr().out) == (missed is not None)
    assert summary["latency_batch"] == 64, "whatever the batches of training"


def test_target_is_an_option(tmp_path: Path) -> None:
    command = ["run", "--target", "0.6", "--epochs", "2", "--warmup-epochs", "0", "--train-images", "300", "--quiet"]
    assert main([*command, "--threads", "1", "--out", str(tmp_path)]) == 0
    assert RunFolder(tmp_path).read_json("config")["pruning"]["target"] == 0.6
    assert RunFolder(tmp_path).read_json("summary")["weights_percent"] == pytest.approx(60, abs=2)


def test_a_run_can_allocate_its_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    command = ["run", "--allocate", "--target", "0.3", "--epochs", "6", "--warmup-epochs", "0", "--train-images", "600"]
    assert main([*command, "--threads", "1", "--tolerance", "9", "--quiet", "--out", str(tmp_path)]) == 0
    summary = folder.read_json("summary")
    assert summary["missed_target"] is None
    assert summary["weights_percent"] == pytest.approx(30, abs=2)
    shares = {layer["name"]: layer["nodes_percent"] for layer in summary["layers"]}
    assert abs(shares["fc1"] - shares["fc2"]) > 5, "the same of both, as without --allocate"


def test_scratch_forgets_the_batch_norms_too(tmp_path: Path) -> None:
    trained, fresh = ResNet(8), ResNet(8)
    with torch.no_grad():
        for tensor in (*trained.parameters(), *trained.buffers()):
            tensor.fill_(3)
    modelfile.save(trained, RunFolder(tmp_path).model)
    torch.manual_seed(0)
    take_shape(fresh, RunFolder(tmp_path))
    for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
        assert not bool((tensor == 3).any()), name


def test_another_seed_gives_other_numbers(tmp_path: Path, tiny: dict[str, Any]) -> None:
    losses = [
        run(make_config("digits-fnn", "none", epochs=1, seed=seed, **tiny), RunFolder(tmp_path / name))["loss"]
        for seed, name in ((0, "a"), (1, "b"), (0, "c"))
    ]
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


def test_held_out_gate_takes_its_images_from_the_training_split() -> None:
    config = make_config("digits-fnn", "none", gate="valid", train_images=240)
    loaded = load_data(config)
    assert loaded.valid is not None
    assert (len(loaded.train), len(loaded.valid)) == (220, 20)
    assert len(load_data(make_config("digits-fnn", "none", train_images=240)).train) == 240


def test_gate_is_the_loss_that_was_asked_for(tmp_path: Path, tiny: dict[str, Any]) -> None:
    lines = {}
    for gate in ("train", "batch", "valid"):
        folder = RunFolder(tmp_path / gate)
        run(make_config("digits-fnn", "none", gate=gate, epochs=1, **tiny), folder)
        lines[gate] = folder.read_lines("metrics")[0]
    assert lines["train"]["gate_loss"] == lines["train"]["train_loss"]
    # The same training, another look at it.
    assert lines["batch"]["train_loss"] == lines["train"]["train_loss"]
    assert lines["batch"]["gate_loss"] != lines["train"]["gate_loss"]
    assert lines["valid"]["gate_loss"] not in (lines["valid"]["train_loss"], lines["train"]["gate_loss"])


def test_held_out_images_are_trained_on_once_pruning_has_ended(tmp_path: Path, tiny: dict[str, Any]) -> None:
    options = {**tiny, "epochs": 4, "warmup_epochs": 0}
    config = make_config("digits-fnn", "rls", **options)
    assert config.pruning is not None
    # A gate that always opens, and a target that the first event reaches.
    pruning = replace(config.pruning, tolerance=100.0, target=0.9, reunite=True)
    together, apart = RunFolder(tmp_path / "together"), RunFolder(tmp_path / "apart")
    run(replace(config, pruning=pruning), together)
    run(replace(config, pruning=replace(pruning, reunite=False)), apart)
    lines, others = together.read_lines("metrics"), apart.read_lines("metrics")
    assert [line["gate_loss"] is None for line in lines] == [False, False, True, True]
    assert all(line["gate_loss"] is not None for line in others)
    assert [line["train_loss"] for line in lines[:2]] == [line["train_loss"] for line in others[:2]]
    assert lines[2]["train_loss"] != others[2]["train_loss"]
    assert len(together.read_lines("events")) == 1


def test_pixels_are_drawn_where_inputs_were_pruned(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--epochs", "2", "--warmup-epochs", "0", "--train-images", "300", "--threads", "1", "--quiet"]
    assert main(["run", "--method", "rls-paper", *options, "--out", str(out)]) == 0
    assert (out / "pixels.png").read_bytes().startswith(b"\x89PNG")
    kept, again = RunFolder(out).read_json("summary"), tmp_path / "again.png"
    draw_pixels(kept, again)  # from the summary alone, without the data
    assert again.read_bytes() == (out / "pixels.png").read_bytes()
    draw_pixels({**kept, "kept_inputs": kept["kept_inputs"][1:]}, again)
    assert again.read_bytes() != (out / "pixels.png").read_bytes()
