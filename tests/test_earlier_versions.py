"""Files that earlier versions wrote are still read, and mean what they meant."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import rlsprune
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.fit.fit import fit
from rlsprune.app.report import write_report
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.state import load_state

FILES = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in FILES.iterdir())
RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.fixture(params=VERSIONS)
def files(request):
    return FILES / request.param


def network(files, name):
    specification = importlib.util.spec_from_file_location("network", files / "network.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return getattr(module, name)()


def json_of(path):
    return json.loads(path.read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_pruned_model_computes_what_it_did(files):
    model = rlsprune.load(files / "model.safetensors", into=network(files, "small_cnn")).eval()
    example = load_state(files / "example.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(example["inputs"]), example["outputs"])


def test_the_states_of_optimizer_and_pruner_go_on(files):
    model = rlsprune.load(files / "model.safetensors", into=network(files, "small_cnn"))
    inputs = load_state(files / "example.safetensors")["inputs"]
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, inputs[:1], ratio=0.3, criterion="obs", warmup_epochs=0)
    saved = load_state(files / "optimizer.safetensors")
    optimizer.load_state_dict(saved)
    pruner.load_state_dict(load_state(files / "pruner.safetensors"))
    widths = {"0": 9 + 1, "3": 9 * 5 + 1, "6": 9 * 6 + 1}  # of the layers' inputs after one event, and their biases
    assert {name: optimizer.inverse(name).shape[-1] for name in widths} == widths
    assert [event.kind for event in pruner.history] == ["prune"]
    model(inputs).square().mean().backward()
    optimizer.step()
    pruner.prune()
    assert len(pruner.history) == 2


def test_a_run_goes_on_to_the_numbers_it_would_have_had(files, tmp_path):
    shutil.copytree(files / "run", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    places = {
        "model": f"{files / 'network.py'}:small_fnn",
        "data": str(files / "features.npz"),
        "import_from": str(tmp_path),
    }
    fit(FitConfig.from_dict(folder.read_json("config") | places), folder)
    ended, wanted = folder.read_lines("metrics"), lines(files / "metrics-at-the-end.jsonl")
    assert len(ended) == len(wanted) == 8
    for mine, theirs in zip(ended, wanted, strict=True):
        layers = [{name: value for name, value in layer.items() if name != "channels"} for layer in mine["layers"]]
        assert layers == theirs["layers"]
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert mine["accuracy"] == theirs["precision"]
    events, wanted = folder.read_lines("events"), lines(files / "events-at-the-end.jsonl")
    assert len(events) == len(wanted)
    for mine, theirs in zip(events, wanted, strict=True):
        for when in ("before", "after"):
            assert mine[f"accuracy_{when}"] == theirs[f"precision_{when}"]
    assert folder.read_json("summary")["accuracy"] == ended[-1]["accuracy"]
    written = (folder.path / "metrics.jsonl").read_text() + (folder.path / "summary.json").read_text()
    assert "precision" not in written, "a resumed run is written in the words of this version"


def test_config_with_an_older_name_of_a_setting(files):
    config = FitConfig.from_dict(RunFolder(files / "run").read_json("config"))
    assert config.pruning.allocate is json_of(files / "run" / "config.json")["pruning"]["spread"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/config.json")), ids=lambda path: path.parent.name)
def test_runs_of_the_documentation_are_read(path):
    folder = RunFolder(path.parent)
    config, written = RunConfig.from_dict(folder.read_json("config")), json_of(path)
    assert config.pruning is None or config.pruning.allocate is written["pruning"].get("spread", False)
    old, new = json_of(path.with_name("summary.json")), folder.read_json("summary")
    assert new["accuracy"] == old["final_precision"]
    assert (new["mean_accuracy"], new["mean_loss"]) == (old["precision"], old["loss"])
    assert [line["accuracy"] for line in folder.read_lines("metrics")] == [
        line["precision"] for line in lines(path.with_name("metrics.jsonl"))
    ]


def test_page_of_a_run_whose_files_count_nodes_alone(files, tmp_path):
    page = write_report([files / "run"], tmp_path / "report.html").read_text()
    assert "Widths are the layers' nodes" in page
