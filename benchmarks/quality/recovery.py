"""Trained networks, cut at once and then trained on: accuracy right after the cut and after training, for every method.

The networks are the ResNets of `benchmarks.quality.trained`. All methods get the same network, FLOPs, images, epochs,
schedule and loss: cross-entropy and the divergence from the given network's outputs, half and half, as
`rlsprune.shrink` trains by default; momentum SGD whose rate falls to zero by a cosine. torch-pruning cannot stop right
at a target in narrow layers, so ours is cut to the FLOPs that it ends at. `tune` chooses each method's rate from the
same list, on 5,000 training images that are held out; `run` then trains on the others and looks at the test images
once right after the cut and once at the end; `draw` prints the table. All of it goes on where it was.

    python -m benchmarks.quality.recovery tune --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery run --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery draw --weights resnet20.safetensors --record recovery.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.quality.shrink import RIVALS, Record, ours, parts
from benchmarks.quality.trained import DEVIATION, MEAN, Case, load_case
from rlsprune.app.data import Batches, load
from rlsprune.training.loop import train_epoch
from rlsprune.training.objective import Objective

HELD_OUT, BATCH = 5000, 128
OURS, SCRATCH = "rlsprune.shrink", "its shape from scratch"
RATES = (0.005, 0.01, 0.02, 0.05)


def _scratch(case: Case, flops: float) -> nn.Module:
    """The shape that ours has, with weights as they are drawn for a new network."""
    model = ours(case, flops)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model


METHODS: Mapping[str, Callable[[Case, float], nn.Module]] = {
    OURS: ours,
    "the same without the refit": lambda case, flops: parts(case, flops)["no refit"](),
    "the same with even widths": lambda case, flops: parts(case, flops)["same share of every layer"](),
    **{name: RIVALS[name] for name in ("L2", "L1", "random")},
    SCRATCH: _scratch,
}
"""From a case and the share of the FLOPs to leave, to the cut network."""


class Training:
    """The images that all methods train on, and how.

    Args:
        data_dir: With CIFAR-10.
        held_out: Whether the last images are left out, to choose rates by.
        images: How many an epoch takes.
        epochs: How many.
        seed: Of their order, the crops and the flips.
    """

    def __init__(self, data_dir: Path | None, held_out: bool, images: int, epochs: int, seed: int) -> None:
        train = load("cifar10", data_dir, verify=False).train
        last = len(train) - (HELD_OUT if held_out else 0)
        self._split, self._images, self.epochs, self._seed = train, images, epochs, seed
        self._used = slice(0, last)
        self.judges = [
            (_normed(x / 255), y)
            for x, y in zip(train.images[last:].split(500), train.labels[last:].split(500), strict=True)
        ]
        """What is held out."""

    def run(self, case: Case, model: nn.Module, rate: float) -> None:
        """Trains the network."""
        batches = Batches(
            self._split.images[self._used],
            self._split.labels[self._used],
            BATCH,
            seed=self._seed,
            images_per_epoch=min(self._images, len(self._split.images[self._used])),
            augment="crop+flip",
            channels_last=True,
            drop_last=True,
        )
        optimizer = SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
        steps = self.epochs * len(batches)
        schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
        objective = Objective(case.model, (case.images[0], case.labels[0]))

        def normed() -> Iterator[tuple[Tensor, Tensor]]:
            return ((_normed(images), labels) for images, labels in batches)

        for _ in range(self.epochs):
            train_epoch(
                model,
                optimizer,
                normed(),
                lambda images, labels: objective.loss(model, images, labels),
                on_batch=lambda number, loss: schedule.step(),
            )


def _normed(pixels: Tensor) -> Tensor:
    scaled = (pixels - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
    return scaled.contiguous(memory_format=torch.channels_last)


def _reached(case: Case, flops: float) -> float:
    """The share of the FLOPs that torch-pruning ends at."""
    return case.share(RIVALS["L2"](case, flops))


def main() -> None:
    """Makes the runs that are missing, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "draw"))
    parser.add_argument("--weights", type=Path, required=True, help="a safetensors file")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--record", type=Path, required=True, help="a JSON file for the rows; known ones are kept")
    parser.add_argument("--flops", default="0.5", help="fractions, with commas between; the first is tuned at")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", help="names, with commas between; all if left out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=50000, help="that an epoch takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"weights": options.weights.name, "epochs": options.epochs, "images": options.images}
    record = Record(options.record, settings)
    if options.what == "draw":
        print(table(record.rows))
        return
    methods = options.methods.split(",") if options.methods else list(METHODS)
    tuning = options.what == "tune"
    for seed in [0] if tuning else map(int, options.seeds.split(",")):
        case = load_case(options.weights, options.data_dir, seed, None)
        training = Training(options.data_dir, tuning, options.images, options.epochs, seed)
        for target in [float(share) for share in options.flops.split(",")][: 1 if tuning else None]:
            share = None
            for method in methods:
                for rate in RATES if tuning else [best_rate(record.rows, method)]:
                    key = {"what": options.what, "seed": seed, "target": target, "method": method, "rate": rate}
                    if record.has(key):
                        continue
                    share = share or _reached(case, target)
                    start = time.process_time()
                    torch.manual_seed(seed)
                    model = METHODS[method](case, share)
                    judged = Case(case.model, case.images, case.labels, training.judges if tuning else case.test)
                    row = {**key, "flops": case.share(model), "cut": judged.accuracy(model)}
                    training.run(case, model, rate)
                    row |= {"trained": judged.accuracy(model), "seconds": time.process_time() - start}
                    record.add(row)
                    print(
                        f"{method}, {100 * row['flops']:.1f} % of the FLOPs, rate {rate:g}, seed {seed}: "
                        f"{row['cut']:.2f} %, trained {row['trained']:.2f} %",
                        flush=True,
                    )


def best_rate(rows: Sequence[Mapping[str, Any]], method: str) -> float:
    """The rate that was best on held-out images.

    Raises:
        SystemExit: It was not tuned.
    """
    tuned = {row["rate"]: row["trained"] for row in rows if row["what"] == "tune" and row["method"] == method}
    if set(tuned) < set(RATES):
        raise SystemExit(f"{method} is not tuned at {sorted(set(RATES) - set(tuned))}: `tune` it first")
    return max(tuned, key=tuned.__getitem__)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Methods in rows; right after the cut and after training, mean and deviation over the seeds."""
    runs = [row for row in rows if row["what"] == "run"]
    lines = [
        "| method | FLOPs left | rate | right after the cut | after training | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for target in sorted({row["target"] for row in runs}, reverse=True):
        for method in METHODS:
            found = [row for row in runs if row["method"] == method and row["target"] == target]
            if found:
                cells = [f"{_mean([row[what] for row in found])} %" for what in ("cut", "trained")]
                flops = statistics.mean(row["flops"] for row in found)
                lines.append(
                    f"| {method} | {100 * flops:.1f} % | {found[0]['rate']:g} | {' | '.join(cells)} | {len(found)} |"
                )
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()
