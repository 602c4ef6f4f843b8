"""Writes the files of this folder. It was run once, with version 0.1.0; later versions only read them.

python tests/data/0.1.0/write.py
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rlsprune.own.config import make_fit_config
from rlsprune.own.run import fit
from rlsprune.state import save_state
from rlsprune.train.folder import RunFolder
from rlsprune.train.observer import Observer

import rlsprune

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from network import small_cnn  # noqa: E402


def train(model: torch.nn.Module, optimizer: rlsprune.RLS, inputs: torch.Tensor, steps: int) -> None:
    targets = torch.nn.functional.one_hot(torch.arange(len(inputs)) % 5, 5).float()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


def write_model() -> None:
    """A pruned model, what it computes, and the states of its optimizer and pruner."""
    torch.manual_seed(0)
    model, inputs = small_cnn(), torch.rand(20, 1, 8, 8)
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, inputs[:1], ratio=0.3, criterion="obs", warmup_epochs=0)
    train(model, optimizer, inputs, 3)
    pruner.prune()
    train(model, optimizer, inputs, 2)
    pruner.save(HERE / "model.safetensors")
    save_state(HERE / "optimizer.safetensors", optimizer.state_dict())
    save_state(HERE / "pruner.safetensors", pruner.state_dict())
    model.eval()
    with torch.no_grad():
        save_state(HERE / "example.safetensors", {"inputs": inputs, "outputs": model(inputs)})


class CopyAfterFour(Observer):
    """Copies the run's folder as it is after the fourth epoch."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def epoch(self, metrics: dict, counts: dict) -> None:
        if metrics["epoch"] == 4:
            shutil.rmtree(HERE / "run", ignore_errors=True)
            shutil.copytree(self.run, HERE / "run", ignore=shutil.ignore_patterns(".lock"))


def write_run() -> None:
    """A run folder as it was after the fourth of eight epochs, and the metrics that it ended with."""
    generator = np.random.default_rng(0)
    features = generator.random((240, 12), dtype=np.float32)
    labels = (features[:, 0] + features[:, 1] > 1).astype(np.int64) + (features[:, 2] > 0.7)
    train, test = slice(180), slice(180, None)
    np.savez(
        HERE / "features.npz",
        x_train=features[train],
        y_train=labels[train],
        x_test=features[test],
        y_test=labels[test],
    )
    config = make_fit_config(
        f"{HERE / 'network.py'}:small_fnn",
        HERE / "features.npz",
        epochs=8,
        warmup_epochs=1,
        ratio=0.3,
        tolerance=0.5,
        target=0.3,
        batch_size=20,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fit(config, RunFolder(run), CopyAfterFour(run))
        shutil.copy(run / "metrics.jsonl", HERE / "metrics-at-the-end.jsonl")
        shutil.copy(run / "events.jsonl", HERE / "events-at-the-end.jsonl")
    path = HERE / "run" / "config.json"
    written = json.loads(path.read_text())
    # Where the files lie is the reader's to say.
    written |= {"experiment": "small_fnn", "model": "network.py:small_fnn", "data": "features.npz", "import_from": "."}
    path.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    write_model()
    write_run()
