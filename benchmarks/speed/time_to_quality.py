"""Measures the time that each method takes to the paper's share of the weights and accuracy, on MNIST.

`python -m benchmarks.speed.time_to_quality --data-dir DATA` trains with every method until the test accuracy is 98.5 %
with at most 16.4 % of the weights (Table 1 of the paper), and prints the time as a ratio to that of the unpruned
network trained by momentum SGD for its whole schedule. Each method tries schedules of several lengths, shortest first.
Only the time of the first that reaches the aim counts. `rls` stops at that share of the weights, and the rivals leave
it. `scratch` gets the shape with which `rls` reached the aim, and trains in the same way; its time does not include the
search for that shape.

Time is processor time of training, pruning and the gate's loss, without evaluation on the test images.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.experiments.recipe import load_data, make_recipe
from rlsprune.app.experiments.registry import BASELINES
from rlsprune.app.run.execute import Run
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer

EPOCHS = (5, 10, 20, 40)
METHODS = (
    "rls",
    "scratch",
    "rls-paper",
    "l1-norm",
    "net-slimming",
    "soft-pruning",
    "weight-level",
    "depgraph",
    "random",
)


@dataclass(frozen=True)
class Result:
    """The result of one method and schedule."""

    seconds: float
    epoch: int | None
    """The epoch in which the aim was reached; None if never."""
    accuracy: float
    weights: float


@dataclass(frozen=True)
class Aim:
    """The aim of training."""

    weights: float
    """The largest share of the weights, in %."""
    accuracy: float
    """The least accuracy, in %."""

    def reached(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether an epoch reached it; a share of nodes cannot match a share of weights exactly."""
        return bool(metrics["accuracy"] >= self.accuracy and metrics["weights_percent"] <= self.weights + 0.2)

    def settings(self, method: str) -> dict[str, float]:
        """Returns the settings with which a method leaves this share of weights; the paper's own method has none."""
        return {"target": self.weights / 100} if method in ("rls", *BASELINES) else {}


def train(config: RunConfig, aim: Aim | None, path: Path) -> Result:
    """Trains until the aim is reached, or to the end if there is none, and saves the network in that folder."""
    run = Run(make_recipe(config, load_data(config)), RunFolder(path))
    reached = None
    while not run.over and reached is None:
        run.epoch(Observer())
        last = run.record.metrics[-1]
        if aim is not None and aim.reached(last):
            reached = run.done
    run.folder.save_model(run.result, {})
    return Result(run.clock.used, reached, last["accuracy"], last["weights_percent"])


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Prints the table row by row, and saves the networks in the folder."""
    shared = {"seed": options.seed, "data_dir": options.data_dir, "threads": 1}
    config = make_config("mnist-fnn", "none", optimizer="sgd", epochs=options.reference_epochs, **shared)
    unpruned, aim = train(config, None, folder / "unpruned"), Aim(options.weights, options.accuracy)
    print("| method | epochs | reached after | accuracy % | weights % | time |\n|---|---:|---:|---:|---:|---:|")
    print(f"| unpruned, SGD | {config.epochs} | - | {unpruned.accuracy:.2f} | 100 | 1 |", flush=True)
    got_there: set[str] = set()
    for method in options.methods.split(","):
        if method == "scratch" and "rls" not in got_there:
            print("| scratch | - | no shape | - | - | - |", flush=True)
            continue
        for epochs in map(int, options.epochs.split(",")):
            own = {"epochs": epochs, "warmup_epochs": epochs // 7, **aim.settings(method)}
            config = make_config("mnist-fnn", method, **own, **shared)
            if method == "scratch":
                config = replace(config, shape_from=str(folder / "rls"))
            shutil.rmtree(folder / method, ignore_errors=True)
            result = train(config, aim, folder / method)
            if result.epoch is not None:
                got_there.add(method)
                break
        ratio = f"{result.seconds / unpruned.seconds:.2f}" if result.epoch else "-"
        reached = f"epoch {result.epoch}" if result.epoch else "never"
        row = (method, str(epochs), reached, f"{result.accuracy:.2f}", f"{result.weights:.1f}", ratio)
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--epochs", default=",".join(map(str, EPOCHS)), help="the schedules, shortest first")
    parser.add_argument("--reference-epochs", type=int, default=20, help="epochs of the unpruned network")
    parser.add_argument("--weights", type=float, default=16.4, help="largest share of the weights, in %%")
    parser.add_argument("--accuracy", type=float, default=98.5, help="least test accuracy, in %%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = options.methods.split(",")
    if "scratch" in methods and "rls" not in methods[: methods.index("scratch")]:
        parser.error("scratch takes its shape from rls: name rls before it in --methods")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
