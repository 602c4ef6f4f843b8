"""Trained networks, cut at once and then trained on: accuracy right after the cut and after training, for every method.

The networks are the ResNets of `benchmarks.quality.trained`. All methods get the same network, FLOPs, images, epochs,
schedule and loss: cross-entropy and the divergence from the given network's outputs, half and half, as
`rlsprune.shrink` trains by default; momentum SGD whose rate falls to zero by a cosine. Methods in rounds cut a part at
the start of each of the first epochs. torch-pruning cannot stop right at a target in narrow layers, so ours is cut to
the FLOPs that it ends at. `tune` chooses each method's rate from as many, on 5,000 training images that are held out
(L1, cuts in rounds and most variants of ours take the rate of their kin); `run` then trains on the others and looks at
the test images once right after the last cut and once at the end; `draw` prints the table and, with --out, the picture.
All of it goes on where it was.

    python -m benchmarks.quality.recovery tune --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery run --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery draw --weights resnet20.safetensors --record recovery.json --out recovery.png
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import rlsprune
from benchmarks.quality.shrink import RIVALS, Record, ours, parts
from benchmarks.quality.trained import DEVIATION, MEAN, Case, load_case
from rlsprune.app.data import Batches, load
from rlsprune.training.loop import train_epoch
from rlsprune.training.objective import divergence

HELD_OUT, BATCH = 5000, 128
OURS, SCRATCH = "rlsprune.shrink", "its shape from scratch"


def _scratch(case: Case, flops: float) -> nn.Module:
    """The shape that ours has, with weights as they are drawn for a new network."""
    model = ours(case, flops)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model


def _sgd(model: nn.Module, rate: float) -> Optimizer:
    return SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=1e-4)


def _rls(model: nn.Module, rate: float) -> Optimizer:
    return rlsprune.RLS(model, lr=rate, weight_decay=1e-4)


def _part(name: str) -> Callable[[Case, float], nn.Module]:
    """Ours without one of its parts."""
    return lambda case, flops: parts(case, flops)[name]()


@dataclass(frozen=True)
class Method:
    """A way to cut, and how often: a part at the start of each of so many epochs."""

    cut: Callable[[Case, float], nn.Module]
    """From a case and the share of its FLOPs to leave, to the cut network."""
    rounds: int = 1
    rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    """Of which the best is taken."""
    like: str | None = None
    """The method whose rate it takes, if it is not tuned itself."""
    distilled: bool = True
    """Whether it learns from the given network too."""
    optimizer: Callable[[nn.Module, float], Optimizer] = _sgd
    """From a network and a rate."""


METHODS: Mapping[str, Method] = {
    OURS: Method(ours),
    "the same without the refit": Method(_part("no refit"), like="L2"),
    "the same with even widths": Method(_part("same share of every layer"), like=OURS),
    "the same with channels by L1": Method(_part("channels by L1"), like=OURS),
    "the same with inconsistent batch norms": Method(_part("the same, batch norms not consistent"), like=OURS),
    "the same without distillation": Method(ours, like=OURS, distilled=False),
    "the same trained by RLS": Method(ours, rates=(0.01, 0.03, 0.1, 0.3), optimizer=_rls),
    "L2": Method(RIVALS["L2"]),
    "L1": Method(RIVALS["L1"], like="L2"),
    "random": Method(RIVALS["random"]),
    SCRATCH: Method(_scratch, rates=(0.02, 0.05, 0.1, 0.2)),
    f"{OURS} in two rounds": Method(ours, 2, like=OURS),
    "L2 in two rounds": Method(RIVALS["L2"], 2, like="L2"),
}


class Training:
    """The images that all methods train on, and how.

    Args:
        case: The given network, which teaches.
        data_dir: With CIFAR-10.
        held_out: Whether the last images are left out, to choose rates by.
        images: How many an epoch takes.
        epochs: How many.
        seed: Of their order, the crops and the flips.
    """

    def __init__(self, case: Case, data_dir: Path | None, held_out: bool, images: int, epochs: int, seed: int) -> None:
        train = load("cifar10", data_dir, verify=False).train
        last = len(train) - (HELD_OUT if held_out else 0)
        self._case, self._split, self._images, self._epochs, self._seed = case, train, images, epochs, seed
        self._used = slice(0, last)
        self._taught: dict[tuple[int, int], Tensor] = {}
        self.judges = [
            (_normed(x / 255), y)
            for x, y in zip(train.images[last:].split(500), train.labels[last:].split(500), strict=True)
        ]
        """What is held out."""

    def run(
        self, method: Method, share: float, rate: float, judged: Callable[[nn.Module], float], kept: Path
    ) -> dict[str, float]:
        """Cuts and trains the network; its FLOPs, and its accuracy right after the last cut and in the end.

        Args:
            method: Which way to cut.
            share: Of the FLOPs, to leave.
            rate: To start from.
            judged: From a network to its accuracy.
            kept: A file for the network after each epoch, from which an interrupted run goes on.
        """
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
        model, optimizer, row, done = self._case.model, None, {}, 0
        if kept.exists():
            model, optimizer, row, done = torch.load(kept, weights_only=False)
        for epoch in range(self._epochs):
            if epoch < done:
                iter(batches)  # draws what the epoch drew
                continue
            if epoch < method.rounds:
                wanted = share ** ((epoch + 1) / method.rounds) / self._case.share(model)
                model = method.cut(replace(self._case, model=model.eval()), wanted)
                row = {"flops": self._case.share(model), "cut": judged(model)}
                optimizer = method.optimizer(model, rate)
            assert optimizer is not None
            self._train(model, optimizer, epoch, batches, rate, method.distilled)
            torch.save((model, optimizer, row, epoch + 1), kept)
        return {**row, "trained": judged(model)}

    def _train(
        self, model: nn.Module, optimizer: Optimizer, epoch: int, batches: Batches, rate: float, distilled: bool
    ) -> None:
        """One epoch."""
        steps = self._epochs * len(batches)

        def taught() -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
            for number, (pixels, labels) in enumerate(batches):
                done = (epoch * len(batches) + number) / steps
                for group in optimizer.param_groups:
                    group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done))
                images = _normed(pixels)
                yield images, (labels, self._given(epoch, number, images) if distilled else labels)

        def loss(images: Tensor, wanted: tuple[Tensor, Tensor]) -> Tensor:
            outputs, (labels, given) = model(images), wanted
            if not distilled:
                return cross_entropy(outputs, labels)
            return (cross_entropy(outputs, labels) + divergence([outputs], [given], classes=True)) / 2

        train_epoch(model, optimizer, taught(), loss)

    @torch.no_grad()
    def _given(self, epoch: int, number: int, images: Tensor) -> Tensor:
        """What the given network says of a batch: the batches of a seed are the same for every method."""
        if (epoch, number) not in self._taught:
            self._taught[epoch, number] = self._case.model.eval()(images)
        return self._taught[epoch, number]


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
    parser.add_argument("--rate", type=float, help="of all methods, in place of the one that `tune` chose for each")
    parser.add_argument("--out", type=Path, help="a PNG file for the picture that `draw` makes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"weights": options.weights.name, "epochs": options.epochs, "images": options.images}
    record = Record(options.record, settings)
    if options.what == "draw":
        print(table(record.rows))
        if options.out is not None:
            draw(record.rows, options.weights.stem, options.out)
        return
    methods = options.methods.split(",") if options.methods else list(METHODS)
    if unknown := sorted(set(methods) - set(METHODS)):
        raise SystemExit(f"unknown methods {unknown}: known are {list(METHODS)}")
    targets = [float(share) for share in options.flops.split(",")]
    tuning = options.what == "tune"
    for seed in [0] if tuning else map(int, options.seeds.split(",")):
        case = load_case(options.weights, options.data_dir, seed, None)
        training = Training(case, options.data_dir, tuning, options.images, options.epochs, seed)
        judged = (replace(case, test=training.judges) if tuning else case).accuracy
        for target in targets[:1] if tuning else targets:
            share = None
            for method in methods:
                if tuning and METHODS[method].like:
                    continue
                for rate in METHODS[method].rates if tuning else [options.rate or best_rate(record.rows, method)]:
                    key = {"what": options.what, "seed": seed, "target": target, "method": method, "rate": rate}
                    if record.has(key):
                        continue
                    share = share or _reached(case, target)
                    start = time.process_time()
                    torch.manual_seed(seed)
                    kept = options.record.with_suffix(f".{'-'.join(map(str, key.values())).replace(' ', '_')}.pt")
                    row = {**key, **training.run(METHODS[method], share, rate, judged, kept)}
                    record.add({**row, "seconds": time.process_time() - start})
                    kept.unlink()
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
    method = METHODS[method].like or method
    tuned = {row["rate"]: row["trained"] for row in rows if row["what"] == "tune" and row["method"] == method}
    if missing := sorted(set(METHODS[method].rates) - set(tuned)):
        raise SystemExit(f"{method} is not tuned at {missing}: `tune` it first")
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


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Accuracy against FLOPs, right after the cut and after training, every method on both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    runs = [row for row in rows if row["what"] == "run"]
    for axes, what, when in zip(
        figure.subplots(1, 2), ("cut", "trained"), ("right after the cut", "after training"), strict=True
    ):
        for method in METHODS:
            found = [row for row in runs if row["method"] == method]
            points = sorted({row["target"] for row in found})
            means = [
                [statistics.mean(row[key] for row in found if row["target"] == point) for key in ("flops", what)]
                for point in points
            ]
            if len(points) > 1:
                wide = 2.5 if method == OURS else 1.2
                shares, accuracies = zip(*means, strict=True)
                axes.plot([100 * x for x in shares], accuracies, marker="o", markersize=3, linewidth=wide, label=method)
        axes.set(xlabel="FLOPs left (%)", ylabel="test accuracy (%)", title=f"{title}, {when}")
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _mean(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()
