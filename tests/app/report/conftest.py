"""Real runs, small ones, made once."""

import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.fit import make_fit_config
from rlsprune.app.experiments.recipe import run
from rlsprune.app.fit.fit import fit
from rlsprune.app.run.folder import RunFolder

EPOCHS = 4
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [8, *[24] * 10]
        self.a_rather_long_name_of_a_part = nn.Sequential(
            *[layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
        )
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.a_rather_long_name_of_a_part(x))

def net():
    return Net()
"""
TINY = {"train_images": 300, "test_images": 100, "threads": 1, "epochs": EPOCHS}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method; not to be changed."""
    root, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    settings = {"rls": {"warmup_epochs": 1}, "l1-norm": {"warmup_epochs": 0}}
    for method, given in settings.items():
        run(make_config("digits-fnn", method, **TINY, **given), RunFolder(root / method))
    torch.set_num_threads(threads)
    return {method: root / method for method in settings}


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `rlsprune fit` on a table with names, ready to deploy; not to be changed."""
    root, threads = tmp_path_factory.mktemp("fitted"), torch.get_num_threads()
    features = np.random.default_rng(0).random((200, 8)).astype(np.float32)
    frame = pandas.DataFrame(features, columns=[f"a rather long name of feature {number}" for number in range(8)])
    frame["kind"] = np.where(features[:, 0] > features[:, 1], "yes", "no")
    frame.to_csv(root / "table.csv", index=False)
    (root / "nets.py").write_text(NETWORK)
    few = {"epochs": 6, "warmup_epochs": 1, "ratio": 0.4, "allocate": False}  # enough to lose features
    options = {"label": ("kind",), **few, "int8": True, "threads": 1}
    config = make_fit_config(f"{root}/nets.py:net", root / "table.csv", **options)
    fit(config, RunFolder(root / "run"))
    torch.set_num_threads(threads)
    return root / "run"


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run to change."""
    return Path(shutil.copytree(runs["rls"], tmp_path / "copy"))


@pytest.fixture
def unfinished(copy: Path) -> Path:
    """A run that has done two of its epochs."""
    folder = RunFolder(copy)
    (copy / "summary.json").unlink()
    folder.write_lines("metrics", folder.read_lines("metrics")[:2])
    folder.write_lines("events", [event for event in folder.read_lines("events") if event["epoch"] <= 2])
    return copy
