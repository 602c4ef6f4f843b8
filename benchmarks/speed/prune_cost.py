"""Measures the time of one prune event of 20 % of every layer, beside torch-pruning's build and step.

Prints ratios to torch-pruning's time (tracing and removing, L1 importance) of the same round. All take turns, so that
other load on the machine slows all of them. Ours traces and verifies the network once, when the Pruner is made, and not
again at each event. torch-pruning can also step again without building, so its step alone is printed as well.
``benchmarks.quality.prune_accuracy`` measures the accuracy after the event.

    python -m benchmarks.speed.prune_cost
    python -m benchmarks.speed.prune_cost --network resnet20 --rounds 5
    python -m benchmarks.speed.prune_cost --quick
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_pruning.pruner.importance import GroupMagnitudeImportance

import rlsprune
from benchmarks.common import CLASSES, clock, train_step
from benchmarks.networks import mini_vgg, mobilenet
from rlsprune.app.models import ResNet

RATIO = 0.2
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mini-VGG": mini_vgg,
    "ResNet-20": partial(ResNet, 20),
    "ResNet-56": partial(ResNet, 56),
    "MobileNetV2": mobilenet,
}
# With SGD the event cuts what torch-pruning cuts, and the momentum; with RLS also P, by a Schur complement.
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD: l1, not compensated": ("sgd", {"criterion": "l1", "compensate": False}),
    "SGD: l1, exact P": ("sgd", {"criterion": "l1"}),
    "SGD: obs, exact P": ("sgd", {"criterion": "obs"}),
    "RLS: l1, not compensated, P sliced": ("rls", {"criterion": "l1", "compensate": False, "inverse": "slice"}),
    "RLS: l1, training P": ("rls", {"criterion": "l1", "statistics": "training"}),
    "RLS: obs, training P": ("rls", {"criterion": "obs", "statistics": "training"}),
    "RLS: obs, exact P": ("rls", {"criterion": "obs"}),
}
MAKING = "(making the Pruner)"
STEP_ALONE = "torch-pruning, step alone"
RIVAL = "torch-pruning, build + step"


def rival(model: nn.Module, example: Tensor) -> tuple[float, float]:
    """Measures the seconds of torch-pruning's whole event, and of its step alone."""
    output = [module for module in model.modules() if getattr(module, "out_features", 0) == CLASSES]
    start = clock()
    pruner = torch_pruning.pruner.BasePruner(
        model, example, GroupMagnitudeImportance(p=1), pruning_ratio=RATIO, ignored_layers=output
    )
    built = clock()
    pruner.step()
    end = clock()
    return end - start, end - built


def optimizer_for(kind: str, model: nn.Module) -> Optimizer:
    """Makes RLS, or SGD with momentum."""
    return rlsprune.RLS(model) if kind == "rls" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ours(
    optimizer: Optimizer, model: nn.Module, example: Tensor, batch: Tensor, **settings: Any
) -> tuple[float, float]:
    """Measures the seconds of our event, and of making the Pruner."""
    start = clock()
    pruner = rlsprune.Pruner(model, optimizer, example, ratio=RATIO, **settings)
    made = clock() - start
    if settings.get("compensate", True) and settings.get("statistics") != "training":
        # Enough batches to fill the sample of rows of every layer.
        pruner.calibrate([batch] * 16)
    start = clock()
    pruner.prune()
    return clock() - start, made


def measure(build: Callable[[], nn.Module], rounds: int) -> dict[str, list[float]]:
    """Measures the seconds of every event by name, round by round."""
    torch.manual_seed(0)
    model, batch, example = build(), torch.rand(16, 3, 32, 32), torch.rand(1, 3, 32, 32)
    states = {}
    for kind in ("sgd", "rls"):
        optimizer = optimizer_for(kind, trained := copy.deepcopy(model))
        train_step(trained, [optimizer], batch, torch.randint(CLASSES, (len(batch),)))
        states[kind] = optimizer.state_dict()
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        found: dict[str, float] = {}
        gc.collect()  # garbage of the previous event is not charged to the next
        found[RIVAL], found[STEP_ALONE] = rival(copy.deepcopy(model), example)
        for name, (kind, settings) in OURS.items():
            gc.collect()
            optimizer = optimizer_for(kind, fresh := copy.deepcopy(model))
            optimizer.load_state_dict(states[kind])
            found[name], found[MAKING] = ours(optimizer, fresh, example, batch, **settings)
        for name, value in found.items() if turn else ():  # the first round imports and allocates
            seconds[name].append(value)
    return seconds


def report(title: str, model: nn.Module, seconds: dict[str, list[float]]) -> None:
    """Prints the ratios."""
    count = sum(p.numel() for p in model.parameters())
    reference = seconds[RIVAL]
    print(f"\n{title} ({count / 1e6:.2f} million parameters), {len(reference)} rounds")
    print("| event | median ms | ratio, median | quartiles |\n|---|---:|---:|---|")
    for name, values in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(values, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {name} | {1e3 * statistics.median(values):.0f} | {middle:.2f} | {low:.2f}–{high:.2f} |", flush=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="ResNet-20, one round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = ["ResNet-20"] if args.quick else [args.network] if args.network else list(NETWORKS)
    for title in chosen:
        build = NETWORKS[title]
        report(title, build(), measure(build, 1 if args.quick else args.rounds))


if __name__ == "__main__":
    main()
