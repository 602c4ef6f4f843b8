"""Files that earlier versions wrote are still read, and mean what they meant."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import rlsprune
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.fit.fit import fit
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.state import load_state

FILES = Path(__file__).parent / "data"
VERSIONS = ("0.1.0",)


@pytest.fixture(params=VERSIONS)
def files(request):
    return FILES / request.param


def network(files, name):
    specification = importlib.util.spec_from_file_location("network", files / "network.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return getattr(module, name)()


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
        assert mine["layers"] == theirs["layers"]
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
    assert len(folder.read_lines("events")) == len(lines(files / "events-at-the-end.jsonl"))
