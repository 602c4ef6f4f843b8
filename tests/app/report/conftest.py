"""Real runs, small ones, made once."""

import shutil
from pathlib import Path

import pytest
import torch

from rlsprune.app.config.experiment import make_config
from rlsprune.app.experiments.recipe import run
from rlsprune.app.run.folder import RunFolder

EPOCHS = 4
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
