"""Measures trained networks that are cut and then trained on: accuracy right after the cut and after training.

The networks are the ResNets of `benchmarks.quality.trained`. All methods, except the variants that are named for it,
get the same network, FLOPs, images, epochs, schedule and loss, that of `rlsprune.shrink` with labels: a fifth
cross-entropy, the rest the divergence from the given network's outputs at a temperature of 4; momentum SGD whose rate
falls to zero by a cosine; forward passes in bfloat16, by autocast. Accuracies are those of the network in float32.
Methods in rounds cut a part at the start of each of the first epochs. torch-pruning cannot stop right at a target in
narrow layers, so ours is cut to the FLOPs that it ends at.

The given network has seen all training images, which therefore cannot choose a rate: networks that remember them would
win. So the test images choose it, one of four for every method, on a seed that no run has. `tune` makes these trials
(cuts in rounds and most variants of ours take the rate of a similar method), and `run` makes the runs. `draw` prints
the tables and, with --out, draws the picture. An interrupted command continues where it was.

    python -m benchmarks.quality.recovery tune --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery run --weights resnet20.safetensors --data-dir DATA --record recovery.json
    python -m benchmarks.quality.recovery run --weights resnet56.safetensors --data-dir DATA --record recovery56.json \
        --rates recovery.json
    python -m benchmarks.quality.recovery draw --weights resnet20.safetensors --record recovery.json --out recovery.png
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim import SGD, Optimizer

import rlsprune
from benchmarks.quality.shrink import RIVALS, Record, ours, parts
from benchmarks.quality.trained import CLASSES, DEVIATION, MEAN, Case, ResNet, load_case
from rlsprune.app.data import Batches, load
from rlsprune.training.loop import in_bfloat16, train_epoch
from rlsprune.training.objective import taught

BATCH, TUNING_SEED = 128, 9
ATTENTION = 1000.0  # the weight that attention transfer was published with
OURS, SCRATCH = "rlsprune.shrink", "its shape from scratch"
COMPARED = (OURS, "L2", "L1", "random", SCRATCH)
WHEN = {"cut": "right after the cut", "trained": "after training"}


def _drawn_anew(model: nn.Module) -> nn.Module:
    """Gives the network the weights of a new one."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model


def _sgd(model: nn.Module, rate: float) -> Optimizer:
    return SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=1e-4)


def _rls(model: nn.Module, rate: float) -> Optimizer:
    return rlsprune.RLS(model, lr=rate, weight_decay=1e-4)


def _part(name: str) -> Callable[[Case, float], nn.Module]:
    """Returns our cut without one of its parts."""
    return lambda case, flops: parts(case, flops)[name]()


@dataclass(frozen=True)
class Method:
    """A way to cut a network and to train it on."""

    cut: Callable[[Case, float], nn.Module]
    """Returns the cut network for a case and the share of its FLOPs to keep."""
    rounds: int = 1
    """Number of cuts, each at the start of one of the first epochs."""
    rates: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    """Rates to try; the best is taken."""
    like: str | None = None
    """The method whose best rate it takes, if it is not tuned itself."""
    scratch: bool = False
    """Whether only the shape of the cut network is kept."""
    distilled: bool = True
    """Whether it learns from the outputs of the given network too."""
    maps: bool = False
    """Whether it learns from the energy of the last maps at each place too, which does not depend on the channels."""
    optimizer: Callable[[nn.Module, float], Optimizer] = _sgd
    """Builds the optimizer for a network and a rate."""


METHODS: Mapping[str, Method] = {
    OURS: Method(ours),
    "the same without the refit": Method(_part("no refit"), like="L2"),
    "the same with even widths": Method(_part("same share of every layer"), like=OURS),
    "the same with channels by L1": Method(_part("channels by L1"), like=OURS),
    "the same with inconsistent batch norms": Method(_part("the same, batch norms not consistent"), like=OURS),
    "the same without distillation": Method(ours, rates=(0.005, 0.01, 0.02, 0.05), distilled=False),
    "the same taught by the last maps too": Method(ours, maps=True, like=OURS),
    "the same trained by RLS": Method(ours, rates=(0.03, 0.1, 0.3, 1.0), optimizer=_rls),
    "L2": Method(RIVALS["L2"]),
    "L1": Method(RIVALS["L1"]),
    "random": Method(RIVALS["random"], rates=(0.02, 0.05, 0.1, 0.2)),
    SCRATCH: Method(ours, rates=(0.05, 0.1, 0.2, 0.4), scratch=True),
    "L2 without distillation": Method(RIVALS["L2"], rates=(0.005, 0.01, 0.02, 0.05), distilled=False),
    f"{OURS} in two rounds": Method(ours, 2, like=OURS),
    f"{OURS} in five rounds": Method(ours, 5, like=OURS),
    "L2 in two rounds": Method(RIVALS["L2"], 2, like="L2"),
    "L2 in five rounds": Method(RIVALS["L2"], 5, like="L2"),
}


class Training:
    """Training of all methods on the same images.

    Args:
        case: The given network, which teaches.
        data_dir: The folder with CIFAR-10.
        images: Number of images per epoch.
        epochs: Number of epochs.
        seed: The seed of the order, the crops and the flips.
    """

    def __init__(self, case: Case, data_dir: Path | None, images: int, epochs: int, seed: int) -> None:
        self._split = load("cifar10", data_dir, verify=False).train
        self._case, self._images, self._epochs, self._seed = case, images, epochs, seed
        self._taught: dict[tuple[int, int, bool], Tensor] = {}
        self._first: dict[tuple[Callable[[Case, float], nn.Module], float], nn.Module] = {}

    def run(self, method: Method, share: float, rate: float, kept: Path) -> dict[str, Any]:
        """Cuts and trains the network.

        Args:
            method: The way to cut and to train.
            share: Share of the FLOPs to keep.
            rate: The first learning rate.
            kept: A file for the network after each epoch, from which an interrupted run goes on.

        Returns:
            The network's FLOPs, and its accuracy right after the last cut and at the end.
        """
        batches = Batches(
            self._split.images,
            self._split.labels,
            BATCH,
            seed=self._seed,
            images_per_epoch=min(self._images, len(self._split)),
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
                model = self._cut(model, method, share ** ((epoch + 1) / method.rounds))
                row = {"flops": self._case.share(model), "cut": self._case.accuracy(model)}
                optimizer = method.optimizer(model, rate)
            assert optimizer is not None
            self._train(model, optimizer, epoch, batches, rate, method)
            torch.save((model, optimizer, row, epoch + 1), kept)
        return {**row, "trained": self._case.accuracy(model)}

    def _cut(self, model: nn.Module, method: Method, share: float) -> nn.Module:
        """Cuts a network to a share of the given one's FLOPs; methods that cut alike share the first cut."""
        wanted = share / self._case.share(model)
        if model is not self._case.model:
            return method.cut(replace(self._case, model=model.eval()), wanted)
        if (method.cut, wanted) not in self._first:
            self._first[method.cut, wanted] = method.cut(self._case, wanted)
        cut = copy.deepcopy(self._first[method.cut, wanted])
        return _drawn_anew(cut) if method.scratch else cut

    def _train(
        self, model: nn.Module, optimizer: Optimizer, epoch: int, batches: Batches, rate: float, method: Method
    ) -> None:
        """Trains for one epoch."""
        steps = self._epochs * len(batches)

        def pairs() -> Iterator[tuple[Tensor, Any]]:
            for number, (pixels, labels) in enumerate(batches):
                done = (epoch * len(batches) + number) / steps
                for group in optimizer.param_groups:
                    group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done))
                images = _normed(pixels)
                given = self._given(epoch, number, images, method.maps) if method.distilled else None
                yield images, (labels, given)

        def loss(images: Tensor, wanted: tuple[Tensor, Tensor | None]) -> Tensor:
            outputs = in_bfloat16(_told(model, method.maps))(images)
            labels, given = wanted
            if given is None:
                return cross_entropy(outputs, labels)
            if not method.maps:
                return taught(outputs, labels, given)
            energies = (normalize(told[:, CLASSES:]) for told in (outputs, given))
            return taught(outputs[:, :CLASSES], labels, given[:, :CLASSES]) + 0.5 * ATTENTION * mse_loss(*energies)

        train_epoch(model, optimizer, pairs(), loss)

    @torch.no_grad()
    def _given(self, epoch: int, number: int, images: Tensor, maps: bool) -> Tensor:
        """Returns the given network's outputs for a batch: all methods have the same batches for a seed."""
        key = (epoch, number, maps)
        if key not in self._taught:
            self._taught[key] = in_bfloat16(_told(self._case.model.eval(), maps))(images)
        return self._taught[key]


def _told(model: nn.Module, maps: bool) -> Callable[[Tensor], Tensor]:
    """Returns a network that outputs class scores and, if wanted, the energy of its last maps at each place."""
    if not maps:
        return model
    assert isinstance(model, ResNet)

    def both(images: Tensor) -> Tensor:
        last = model.last_maps(images)
        return torch.cat([model.classify(last), last.square().mean(1).flatten(1)], dim=1)

    return both


def _normed(pixels: Tensor) -> Tensor:
    scaled = (pixels - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
    return scaled.contiguous(memory_format=torch.channels_last)


def _reached(case: Case, flops: float) -> float:
    """Computes the share of the FLOPs that torch-pruning ends at."""
    return case.share(RIVALS["L2"](case, flops))


def main() -> None:
    """Makes the missing runs, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "draw"))
    parser.add_argument("--weights", type=Path, required=True, help="a safetensors file")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--record", type=Path, required=True, help="a JSON file for the rows; known ones are kept")
    parser.add_argument("--rates", type=Path, help="the record of another network with the rates to take")
    parser.add_argument(
        "--flops", default="0.5", help="fractions, separated by commas; the first is the one that is tuned at"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=10000, help="images per epoch")
    parser.add_argument("--out", type=Path, help="a PNG file for the picture that `draw` makes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"weights": options.weights.name, "epochs": options.epochs, "images": options.images}
    if options.what == "draw" and options.record.exists():
        settings = json.loads(options.record.read_text())["settings"]
    record = Record(options.record, settings)
    tuned = json.loads(options.rates.read_text())["rows"] if options.rates else record.rows
    if options.what == "draw":
        for compared, when in itertools.product((True, False), WHEN):
            print(f"{WHEN[when]}\n\n{table(record.rows, tuned, when, compared)}\n")
        if options.out is not None:
            draw(record.rows, tuned, options.weights.stem, options.out)
        return
    methods = options.methods.split(",") if options.methods else list(METHODS)
    if unknown := sorted(set(methods) - set(METHODS)):
        raise SystemExit(f"unknown methods {unknown}: known are {list(METHODS)}")
    if rounds := [method for method in methods if METHODS[method].rounds > options.epochs]:
        raise SystemExit(f"{rounds} cut more often than --epochs {options.epochs}: train longer, or leave them out")
    targets = [float(share) for share in options.flops.split(",")]
    tuning = options.what == "tune"
    for seed in [TUNING_SEED] if tuning else map(int, options.seeds.split(",")):
        case = load_case(options.weights, options.data_dir, seed, None)
        training = Training(case, options.data_dir, options.images, options.epochs, seed)
        for target in targets[:1] if tuning else targets:
            share = None
            for method in methods:
                if tuning and METHODS[method].like:
                    continue
                for rate in METHODS[method].rates if tuning else [best_rate(tuned, method)]:
                    key = {"what": options.what, "seed": seed, "target": target, "method": method, "rate": rate}
                    if record.has(key):
                        continue
                    share = share or _reached(case, target)
                    start = time.process_time()
                    torch.manual_seed(seed)
                    kept = options.record.with_suffix(f".{'-'.join(map(str, key.values())).replace(' ', '_')}.pt")
                    row = {**key, **training.run(METHODS[method], share, rate, kept)}
                    record.add({**row, "seconds": time.process_time() - start})
                    kept.unlink()
                    print(
                        f"{method}, {100 * row['flops']:.1f} % of the FLOPs, rate {rate:g}, seed {seed}: "
                        f"{row['cut']:.2f} %, trained {row['trained']:.2f} %",
                        flush=True,
                    )


def best_rate(rows: Sequence[Mapping[str, Any]], method: str) -> float:
    """Returns the rate at which a method was best when it was tuned.

    Raises:
        SystemExit: It was not tuned.
    """
    method = METHODS[method].like or method
    own = [row for row in rows if row["what"] == "tune" and row["method"] == method]
    tuned = {row["rate"]: row["trained"] for row in own if row["target"] == own[0]["target"]}
    if missing := sorted(set(METHODS[method].rates) - set(tuned)):
        raise SystemExit(f"{method} is not tuned at {missing}: `tune` it first")
    return max(tuned, key=tuned.__getitem__)


@dataclass(frozen=True)
class Runs:
    """The runs of one method at one target, seed by seed."""

    method: str
    target: float
    rate: float
    flops: Sequence[float]
    cut: Sequence[float]
    """Accuracies on all test images, right after the last cut."""
    trained: Sequence[float]
    """Accuracies at the end."""


def by_method(rows: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> list[Runs]:
    """Returns the runs at the best rates, largest target first."""
    made = [row for row in rows if row["what"] == "run"]
    found = []
    for target in sorted({row["target"] for row in made}, reverse=True):
        for method in METHODS:
            of_it = [row for row in made if row["method"] == method and row["target"] == target]
            if not of_it:
                continue
            rate = best_rate(tuned, method)
            if own := [row for row in of_it if row["rate"] == rate]:
                flops, cut, trained = ([row[what] for row in own] for what in ("flops", "cut", "trained"))
                found.append(Runs(method, target, rate, flops, cut, trained))
    return found


def table(rows: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]], when: str, compared: bool) -> str:
    """Returns accuracies by method and FLOPs: mean and deviation over the seeds, and their number.

    Args:
        rows: The runs.
        tuned: The trials that chose the rates.
        when: "cut" or "trained".
        compared: Whether to list the methods that are compared, or the other variants.
    """
    made = by_method(rows, tuned)
    own = [one for one in made if (one.method in COMPARED) is compared]
    if not own:
        return ""
    methods = [method for method in METHODS if any(one.method == method for one in own)]
    targets = sorted({one.target for one in own}, reverse=True)
    reached = {t: statistics.mean(f for one in own if one.target == t for f in one.flops) for t in targets}
    lines = [f"| FLOPs left | {' | '.join(f'{100 * share:.0f} %' for share in reached.values())} | rate |"]
    lines.append("|---|" + "---:|" * (len(targets) + 1))
    for method in methods:
        found = {one.target: one for one in own if one.method == method}
        cells = [_cell(found[target], when, reached[target]) if target in found else "" for target in targets]
        lines.append(f"| {method} | {' | '.join(cells)} | {next(iter(found.values())).rate:g} |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draws accuracy against FLOPs, right after the cut and after training, with every compared method on both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    made = by_method(rows, tuned)
    for axes, (when, named) in zip(figure.subplots(1, 2), WHEN.items(), strict=True):
        for method in COMPARED:
            points = [one for one in made if one.method == method]
            if not points:
                continue
            axes.errorbar(
                [100 * statistics.mean(one.flops) for one in points],
                [statistics.mean(getattr(one, when)) for one in points],
                [statistics.stdev(getattr(one, when)) if len(one.trained) > 1 else 0 for one in points],
                marker="o",
                markersize=3,
                linewidth=2.5 if method == OURS else 1.2,
                label=method,
            )
        axes.set(xlabel="FLOPs left (%)", ylabel="test accuracy (%)", title=f"{title}, {named}")
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _cell(runs: Runs, when: str, flops: float) -> str:
    """Returns mean, deviation and number of runs, with the FLOPs where they are not those of the column."""
    values, own = getattr(runs, when), statistics.mean(runs.flops)
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    elsewhere = f", {100 * own:.1f} % of the FLOPs" if abs(own - flops) > 0.005 else ""
    return f"{statistics.mean(values):.2f}{deviation} ({len(values)}{elsewhere})"


if __name__ == "__main__":
    main()
