"""Checks that a long run does not grow: memory, open files, threads and processes over 10,000 steps and 100 prunes.

A tiny network trains on random features, prunes at every epoch, and writes checkpoints and metrics as every run does.
The resources of the process are printed on the way.

    python -m benchmarks.speed.soak_run --epochs 100
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import rlsprune
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.config.settings import OURS
from rlsprune.app.data.datasets import Dataset, Split
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.app.run.recipe import Recipe

STEPS = 100  # per epoch
BATCH = 16
WIDTH = 600
WARM = 0.2  # share of the run after which nothing may grow any more
ALLOWED_MB = 8.0

EVERY_EPOCH = replace(OURS, ratio=0.02, gate="train", settle=0.0, tolerance=1e6, target=None, reunite=False)


class Held(NamedTuple):
    """The resources of this process."""

    megabytes: float
    objects: int
    files: int
    threads: int
    """The system's threads, some of which are torch's."""
    python_threads: int
    children: int


def held() -> Held:
    """Counts the resources of this process, by Linux's counters."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = list(Path("/proc/self/task").iterdir())
    return Held(
        megabytes=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        objects=len(gc.get_objects()),
        files=len(list(Path("/proc/self/fd").iterdir())) - 1,  # one is the listing's own
        threads=len(tasks),
        python_threads=threading.active_count(),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
    )


class Watch(Observer):
    """Records the resources of the process after every epoch."""

    def __init__(self) -> None:
        self.seen: list[Held] = []
        self.prunes = 0
        self.steps = 0

    def batch(self, number: int, loss: torch.Tensor) -> None:
        """Counts a step."""
        self.steps += 1

    def event(self, event: Mapping[str, Any]) -> None:
        """Counts a prune."""
        self.prunes += event["kind"] == "prune"

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Records the resources, and prints them every tenth epoch."""
        self.seen.append(held())
        if metrics["epoch"] % 10 == 0:
            now = self.seen[-1]
            print(
                f"{self.steps:7,} steps  {self.prunes:3} prunes  {now.megabytes:7.1f} MB  {now.objects:7,} objects  "
                f"{now.files} files  {now.threads} threads  {now.children} children",
                flush=True,
            )


def recipe(epochs: int) -> Recipe:
    """Makes the recipe of the run."""

    def build_model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    def split(count: int, seed: int) -> Split:
        features = torch.rand(count, 12, generator=torch.Generator().manual_seed(seed))
        return Split(features, features[:, :3].argmax(1))

    return Recipe(
        config={"epochs": epochs},
        title={"experiment": "soak", "method": "rls", "seed": 0},
        data=Dataset("soak", ("a", "b", "c"), split(BATCH * STEPS, 1), split(100, 2)),
        layout="plain",
        build_model=build_model,
        build_optimizer=rlsprune.RLS,
        build_method=lambda model, optimizer, example: RLSPruning(model, optimizer, example, EVERY_EPOCH, epochs, 0),
        loss=mean_squared_error,
        gate="train",
        epochs=epochs,
        batch_size=BATCH,
        seed=0,
        threads=1,
    )


def main() -> int:
    """Returns 0 if nothing grew, nothing was left over and every epoch pruned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    before, watch = held(), Watch()
    with tempfile.TemporaryDirectory() as folder:
        train_and_prune(recipe(options.epochs), RunFolder(folder), watch)
        files = sorted(path.name for path in Path(folder).iterdir())
    after = held()
    warm, last = watch.seen[int(WARM * options.epochs)], watch.seen[-1]
    print(f"{watch.steps:,} steps, {watch.prunes} prunes; the folder holds {', '.join(files)}")
    print(
        f"from {WARM:.0%} of the run to its end: {last.megabytes - warm.megabytes:+.1f} MB, "
        f"{last.objects - warm.objects:+,} objects, {last.files - warm.files:+} files, "
        f"{last.threads - warm.threads:+} threads"
    )
    print(
        f"from before to after the run: {after.files - before.files:+} files, "
        f"{after.python_threads - before.python_threads:+} Python threads, "
        f"{after.children - before.children:+} children"
    )
    grew = last.megabytes - warm.megabytes > ALLOWED_MB or last.files > warm.files or last.threads > warm.threads
    left = (
        after.files > before.files or after.python_threads > before.python_threads or after.children > before.children
    )
    return int(grew or left or watch.prunes < options.epochs)


if __name__ == "__main__":
    raise SystemExit(main())
