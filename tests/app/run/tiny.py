"""A run that takes a few milliseconds an epoch, and still trains, prunes and can be resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import rlsprune
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.config.settings import OURS, TrainingSettings
from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.app.run.recipe import Recipe

SETTINGS = replace(
    OURS, ratio=0.4, gate="train", criterion="rls", settle=0.0, tolerance=1.0, target=None, reunite=False
)


def split(count: int, seed: int) -> Split:
    images = torch.rand(count, 12, generator=torch.Generator().manual_seed(seed))
    return Split(images, images[:, :3].argmax(1))


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))


def tiny_recipe(**changes: Any) -> Recipe:
    epochs = changes.get("epochs", 3)
    recipe = Recipe(
        config={"epochs": epochs},
        title={"experiment": "tiny", "method": "rls", "seed": 0},
        data=Dataset("tiny", ("a", "b", "c"), split(48, 1), split(24, 2)),
        layout="plain",
        build_model=build_model,
        build_optimizer=rlsprune.RLS,
        build_method=lambda model, optimizer, example: RLSPruning(model, optimizer, example, SETTINGS, epochs, 0),
        loss=mean_squared_error,
        gate="train",
        epochs=epochs,
        batch_size=16,
        seed=0,
        threads=1,
        training=TrainingSettings(lr_decay=0.4, average=0.5),
    )
    return replace(recipe, **changes)


def numbers(folder: RunFolder) -> tuple[Any, ...]:
    """Everything in a finished run's folder that must not depend on what happened on the way."""
    metrics = [
        {key: value for key, value in line.items() if not key.endswith("seconds")}
        for line in folder.read_lines("metrics")
    ]
    summary = {
        key: value
        for key, value in folder.read_json("summary").items()
        if not key.endswith("seconds") and not key.startswith(("latency", "speedups"))
    }
    weights = {name: (tuple(tensor.shape), tensor.tolist()) for name, tensor in load_file(folder.model).items()}
    return metrics, folder.read_lines("events"), summary, weights


def leftovers(path: Path) -> list[str]:
    """Files under other names than those of a finished run."""
    known = {".lock", "config.json", "environment.json", "metrics.jsonl", "events.jsonl", "summary.json"}
    known |= {"model.safetensors", "state.safetensors"}
    return [str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file() and entry.name not in known]
