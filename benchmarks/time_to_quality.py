"""How long each method takes to a network with the paper's share of the weights and its precision, on MNIST.

`python benchmarks/time_to_quality.py --data-dir DATA` trains with every method until the test precision is 98.5 % with
at most 16.4 % of the weights (Table 1 of the paper), and prints the time as a ratio to that of the unpruned network
trained by momentum SGD for its whole schedule. Each method is given schedules of several lengths, shortest first, and
the first one that gets there counts; what the others took does not. The rivals' ratios are raised to where they leave
16.4 %.

Time is the processor's, for training, pruning and the gate's loss; evaluation on the test images is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.data.datasets import Split
from rlsprune.experiments.config import RunConfig, make_config
from rlsprune.experiments.run import load_data, make_recipe
from rlsprune.train.folder import RunFolder
from rlsprune.train.loop import Evaluation
from rlsprune.train.method import Method
from rlsprune.train.observer import Observer
from rlsprune.train.run import Run

WEIGHTS, PRECISION = 16.4, 98.5
STRUCTURED, ZEROED = 0.77, 0.836
"""What goes of every hidden layer, or of all weights, so that 16.4 % of the weights stay."""
EPOCHS = (5, 10, 20, 40)
METHODS = ("rls", "rls-paper", "l1-norm", "net-slimming", "soft-pruning", "weight-level", "depgraph")


@dataclass(frozen=True)
class Result:
    """Of one method and schedule."""

    seconds: float
    epoch: int | None
    """In which the aim was reached; None if never."""
    precision: float
    weights: float


class TimedRun(Run):
    """Leaves the evaluation on the test images out of its time."""

    untimed = 0.0

    def _evaluate(self, split: Split) -> Evaluation:
        start = time.process_time()
        result = super()._evaluate(split)
        if split is self.data.test:
            self.untimed += time.process_time() - start
        return result


def rival(config: RunConfig, model: nn.Module, optimizer: Optimizer, example: Tensor) -> Method:
    """A rival that leaves 16.4 % of the weights."""
    if config.method == "soft-pruning":
        return SoftPruning(model, example, ratio=ZEROED)
    if config.method == "weight-level":
        return WeightLevel(model, example, ratio=ZEROED, prune_epoch=config.prune_epoch)
    kinds: dict[str, Callable[..., Method]] = {"l1-norm": L1Norm, "net-slimming": NetSlimming, "depgraph": DepGraph}
    return kinds[config.method](model, optimizer, example, ratio=STRUCTURED, prune_epoch=config.prune_epoch)


def train(config: RunConfig, stop: bool = True) -> Result:
    """Trains until the aim is reached, or to the end."""
    recipe = make_recipe(config, load_data(config))
    if config.method not in ("rls", "rls-paper", "none"):
        recipe = replace(recipe, build_method=lambda *parts: rival(config, *parts))
    with tempfile.TemporaryDirectory() as folder:
        run = TimedRun(recipe, RunFolder(Path(folder)))
        start = time.process_time()
        reached = None
        while run.done < config.epochs and reached is None:
            run.epoch(Observer())
            last = run.record.metrics[-1]
            if stop and last["precision"] >= PRECISION and last["weights_percent"] <= WEIGHTS + 0.05:
                reached = run.done
        seconds = time.process_time() - start - run.untimed
    return Result(seconds, reached, last["precision"], last["weights_percent"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--epochs", default=",".join(map(str, EPOCHS)), help="the schedules, shortest first")
    parser.add_argument("--reference-epochs", type=int, default=20, help="of the unpruned network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    shared = {"seed": options.seed, "data_dir": options.data_dir, "threads": 1}
    config = make_config("mnist-fnn", "none", optimizer="sgd", epochs=options.reference_epochs, **shared)
    unpruned = train(config, stop=False)
    print("| method | epochs | reached after | precision % | weights % | time |\n|---|---:|---:|---:|---:|---:|")
    print(f"| unpruned, SGD | {config.epochs} | - | {unpruned.precision:.2f} | 100 | 1 |", flush=True)
    for method in options.methods.split(","):
        for epochs in map(int, options.epochs.split(",")):
            config = make_config("mnist-fnn", method, epochs=epochs, warmup_epochs=max(1, epochs // 7), **shared)
            result = train(config)
            if result.epoch is not None:
                break
        ratio = f"{result.seconds / unpruned.seconds:.2f}" if result.epoch else "-"
        reached = f"epoch {result.epoch}" if result.epoch else "never"
        row = (method, str(epochs), reached, f"{result.precision:.2f}", f"{result.weights:.1f}", ratio)
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
