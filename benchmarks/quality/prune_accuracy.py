"""Measures test accuracy right after one prune event, without further training, beside torch-pruning's importances.

Every method gets the same trained network and removes the same number of channels of every layer, except for criterion
``rls``, whose intersection removes fewer; the share of parameters left is printed with each. Methods that need data
(our exact statistics, Taylor's gradients) see the same training images. Trained networks are kept in ``--cache``.
``--run`` takes the network of a finished run instead; a network that was already pruned has little left to spare.
``--rows`` measures the cost of a smaller sample of inputs instead; with fewer rows than a layer has inputs, exact P is
kept in factors of that rank.

    python -m benchmarks.quality.prune_accuracy --data-dir DATA --cache CACHE
    python -m benchmarks.quality.prune_accuracy --data-dir DATA --run runs/mnist-fnn-rls-seed0
    python -m benchmarks.quality.prune_accuracy --data-dir DATA --batch-norm no --rows 64 256 1024 2048
    python -m benchmarks.quality.prune_accuracy --quick
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch_pruning.pruner import importance

import rlsprune
from benchmarks.common import CLASSES, clock, train_step
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data import Batches, Dataset, Split, load
from rlsprune.app.experiments.recipe import load_data
from rlsprune.app.experiments.registry import experiment
from rlsprune.app.models import FNN, MiniVGG
from rlsprune.app.run.folder import RunFolder
from rlsprune.statistics import inputs

CALIBRATION_BATCHES = 16


@dataclass(frozen=True)
class Case:
    """A network and its training, always with RLS."""

    title: str
    build: Callable[[bool], nn.Module]
    """Function that builds the network; its argument says whether to use batch norm."""
    data: str
    flat: bool
    train_images: int
    test_images: int
    epochs: int
    batch: int
    augment: str | None = None


CASES = {
    "fnn": Case("FNN 784-1024-512-10, MNIST", lambda bn: FNN(batch_norm=bn), "mnist", True, 60000, 10000, 3, 128),
    "vgg": Case(
        "mini-VGG, CIFAR-10", lambda bn: MiniVGG(batch_norm=bn), "cifar10", False, 5000, 2000, 8, 64, "crop+flip"
    ),
}
QUICK = Case("FNN 784-128-64-10, digits", lambda bn: FNN((784, 128, 64, 10), bn), "digits", True, 4000, 1000, 2, 64)


@dataclass
class Trained:
    """A trained network, and the data that the methods may use."""

    model: nn.Module
    state: dict[str, Any] | None
    """The state of the optimizer, if it is known."""
    batches: list[tuple[Tensor, Tensor]]
    """Training images for statistics and gradients."""
    test: list[tuple[Tensor, Tensor]]

    @property
    def example(self) -> Tensor:
        """Returns an example of the network's input."""
        return self.test[0][0][:1]

    def fresh(self) -> tuple[nn.Module, rlsprune.RLS]:
        """Copies the network and makes its optimizer, to be pruned."""
        model = copy.deepcopy(self.model)
        optimizer = rlsprune.RLS(model)
        if self.state is not None:
            optimizer.load_state_dict(self.state)
        return model, optimizer

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Computes the accuracy in %."""
        model.eval()
        hits = [(model(images).argmax(1) == labels).float() for images, labels in self.test]
        return 100 * torch.cat(hits).mean().item()


def prepare(case: Case, batch_norm: bool, data: Dataset, seed: int, cache: Path | None) -> Trained:
    """Trains a network, or takes it from the cache."""
    torch.manual_seed(seed)
    model = case.build(batch_norm).to(memory_format=torch.channels_last)
    # The paper's η = 1 is for networks without batch norm; the mini-VGG with batch norm diverges at it.
    optimizer = rlsprune.RLS(model, lr=0.1 if batch_norm else 1.0)

    train = data.train.select(torch.arange(case.train_images))
    test = data.test.select(torch.arange(case.test_images))
    options: dict[str, Any] = {"flat": case.flat, "channels_last": not case.flat}
    batches = Batches(train.images, train.labels, case.batch, seed=seed, augment=case.augment, **options)
    slug = "".join(c if c.isalnum() else "-" for c in case.title)
    path = cache / f"{slug}-bn{int(batch_norm)}-seed{seed}.pt" if cache is not None else None
    if path is not None and path.exists():
        stored = torch.load(path)
        model.load_state_dict(stored["model"])
        state = stored["optimizer"]
    else:
        for _ in range(case.epochs):
            for batch, targets in batches:
                train_step(model, [optimizer], batch, targets)
        state = optimizer.state_dict()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": state}, path)
    optimizer.close()
    return ready(model, state, train, test, case.flat, seed)


def of_run(folder: Path, data_dir: str | None) -> Trained:
    """Loads the network of a finished run, with its data."""
    config = RunConfig.from_dict(RunFolder(folder).read_json("config"))
    data = load_data(replace(config, data_dir=data_dir or config.data_dir))
    model = rlsprune.load(folder / "model.safetensors", into=experiment(config.experiment).build())
    return ready(model, None, data.train, data.test, not experiment(config.experiment).convolutional, config.seed)


def ready(model: nn.Module, state: dict[str, Any] | None, train: Split, test: Split, flat: bool, seed: int) -> Trained:
    """Puts a network together with batches of the size that the methods get."""
    model.to(memory_format=torch.channels_last)
    options: dict[str, Any] = {"flat": flat, "channels_last": not flat}
    seen = Batches(train.images, train.labels, 128, seed=seed + 1, **options)
    held = Batches(test.images, test.labels, 250, shuffle=False, **options)
    return Trained(model, state, list(islice(seen, CALIBRATION_BATCHES)), list(held))


def rivals(batch_norm: bool) -> dict[str, Any]:
    """Returns torch-pruning's importances by name."""
    found = {
        "torch-pruning L1": importance.GroupMagnitudeImportance(p=1),
        "torch-pruning L2": importance.GroupMagnitudeImportance(p=2),
        "torch-pruning Taylor": importance.GroupTaylorImportance(),
    }
    return found | ({"torch-pruning BN scale": importance.BNScaleImportance()} if batch_norm else {})


OURS: dict[str, dict[str, Any]] = {
    "ours: l1, not compensated": {"criterion": "l1", "compensate": False},
    "ours: l1, training P": {"criterion": "l1", "statistics": "training"},
    "ours: l1, exact P": {"criterion": "l1"},
    "ours: rls, exact P": {"criterion": "rls"},
    "ours: obs, training P": {"criterion": "obs", "statistics": "training"},
    "ours: obs, exact P": {"criterion": "obs"},
}


def prune_by_rival(trained: Trained, score: Any, ratio: float) -> nn.Module:
    """Prunes a copy by torch-pruning's own event."""
    model = copy.deepcopy(trained.model)
    if isinstance(score, importance.GroupTaylorImportance):
        model.eval()
        model.zero_grad()
        for images, labels in trained.batches:
            mean_squared_error(model(images), labels).backward()
    output = [module for module in model.modules() if getattr(module, "out_features", 0) == CLASSES]
    pruner = torch_pruning.pruner.BasePruner(model, trained.example, score, pruning_ratio=ratio, ignored_layers=output)
    pruner.step()
    return model


def prune_by_ours(
    trained: Trained, ratios: dict[str, float], seconds: list[float] | None = None, **settings: Any
) -> nn.Module:
    """Prunes a copy by our event, and appends its time to the seconds."""
    model, optimizer = trained.fresh()
    pruner = rlsprune.Pruner(model, optimizer, trained.example, ratio=ratios, patience=None, **settings)
    if settings.get("statistics") != "training" and settings.get("compensate", True):
        pruner.calibrate(trained.batches)
    start = clock()
    pruner.prune()
    if seconds is not None:
        seconds.append(clock() - start)
    return model


def shares_gone(before: nn.Module, after: nn.Module) -> dict[str, float]:
    """Computes the share that each layer lost, for every layer that lost output channels."""
    widths = [
        {name: len(m.weight) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
        for model in (before, after)
    ]
    return {name: 1 - widths[1][name] / width for name, width in widths[0].items() if widths[1][name] < width}


def compare(title: str, trained: Trained, args: argparse.Namespace) -> None:
    """Prints accuracy after the event, for each method and ratio."""
    whole = sum(p.numel() for p in trained.model.parameters())
    print(f"\n{title}: {trained.accuracy(trained.model):.2f} %")
    print(f"| {'method':<27} | " + " | ".join(f"{ratio:.0%} of every layer" for ratio in args.ratios) + " |")
    print("|---|" + "---:|" * len(args.ratios))
    ratios: dict[float, dict[str, float]] = {}
    scores = rivals(any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in trained.model.modules()))
    for name in [*scores, *OURS]:
        if trained.state is None and name in OURS and OURS[name].get("statistics") == "training":
            continue  # it needs the P of the training
        cells = []
        for ratio in args.ratios:
            if name in OURS:
                model = prune_by_ours(trained, ratios[ratio], **OURS[name])
            else:
                model = prune_by_rival(trained, scores[name], ratio)
                # Ours then removes exactly as many: torch-pruning rounds the number that stays down.
                ratios[ratio] = shares_gone(trained.model, model)
            left = sum(p.numel() for p in model.parameters()) / whole
            cells.append(f"{trained.accuracy(model):.2f} ({left:.0%} left)")
        print(f"| {name:<27} | " + " | ".join(cells) + " |", flush=True)


def compare_samples(title: str, trained: Trained, args: argparse.Namespace) -> None:
    """Prints accuracy after an event, and its time beside torch-pruning's, for each number of rows of a layer."""
    print(f"\n{title}: {trained.accuracy(trained.model):.2f} %")
    print("| rows | " + " | ".join(f"{ratio:.0%} of every layer | × torch-pruning" for ratio in args.ratios) + " |")
    print("|---|" + "---:|---:|" * len(args.ratios))
    usual = inputs.rows_kept
    score = importance.GroupMagnitudeImportance(p=1)
    for rows in [*args.rows, None]:
        inputs.rows_kept = usual if rows is None else lambda _, rows=rows: rows
        cells = []
        for ratio in args.ratios:
            start = clock()
            shares = shares_gone(trained.model, prune_by_rival(trained, score, ratio))
            theirs = clock() - start
            seconds: list[float] = []
            model = prune_by_ours(trained, shares, seconds=seconds)
            cells.append(f"{trained.accuracy(model):.2f} | {seconds[0] / theirs:.1f}")
        print(f"| {rows or 'as built'} | " + " | ".join(cells) + " |", flush=True)
    inputs.rows_kept = usual


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES, help="default: all")
    parser.add_argument("--run", type=Path, help="the folder of a finished run whose network to prune")
    parser.add_argument("--batch-norm", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--data-dir", help="folder of MNIST and CIFAR-10; default: RLSPRUNE_DATA")
    parser.add_argument("--cache", type=Path, help="folder for trained networks; default: none are kept")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of sampled rows per layer to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small network on the embedded digits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="torch_pruning")
    cases = [QUICK] if args.quick else [CASES[args.network]] if args.network else list(CASES.values())
    if args.run is not None:
        compare(args.run.name, of_run(args.run, args.data_dir), args)
        return
    for case in cases:
        for batch_norm in {"no": [False], "yes": [True], "both": [False, True]}[args.batch_norm]:
            for seed in args.seeds:
                kind = "with batch norm" if batch_norm else "without batch norm"
                trained = prepare(case, batch_norm, load(case.data, args.data_dir), seed, args.cache)
                (compare_samples if args.rows else compare)(f"{case.title}, {kind}, seed {seed}", trained, args)


if __name__ == "__main__":
    main()
