"""What P in factors costs in accuracy: RLS at several ranks, beside P whole (rank 0 here), momentum SGD and AdamW.

The same weights, batches and epochs for all, from each seed. ``valid`` is accuracy and loss on training images that
were held out, by which a rank or a rate is chosen; ``test`` is looked at with ``--test`` alone.

    python -m benchmarks.quality.rank --network fnn --epochs 10 --ranks 16,8,0 --seeds 0,1,2 --test --data-dir DATA
    python -m benchmarks.quality.rank --network resnet20 --train-images 10000 --epochs 3 --lr 0.1,0.3 --data-dir DATA
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import rlsprune
from benchmarks.common import clock
from benchmarks.networks import mini_vgg
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.data import Batches, Dataset, Split, load
from rlsprune.app.models import FNN, ResNet


@dataclass(frozen=True)
class Case:
    """A network, and how it is trained."""

    build: Callable[[], nn.Module]
    data: str
    loss: str
    batch: int
    rate: float
    """η of RLS by default."""


CASES = {
    "fnn": Case(FNN, "mnist", "mse", 128, 1.0),
    "vgg": Case(mini_vgg, "cifar10", "mse", 64, 1.0),
    "resnet20": Case(lambda: ResNet(20).to(memory_format=torch.channels_last), "cifar10", "cross-entropy", 64, 0.1),
}


def optimizer_for(name: str, model: nn.Module, lr: float) -> Optimizer:
    """By its name on the command line: a rank, 0 for P whole, or ``sgd`` or ``adamw``."""
    if name == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    if name == "adamw":
        return AdamW(model.parameters(), lr=lr)
    return rlsprune.RLS(model, lr=lr, fallback_lr=min(0.1, lr), rank=int(name) or None)


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Split, loss: Callable[[Tensor, Tensor], Tensor], flat: bool
) -> tuple[float, float]:
    """Accuracy in % and loss."""
    model.eval()
    parts = Batches(split.images, split.labels, 500, shuffle=False, flat=flat, channels_last=not flat)
    outputs = torch.cat([model(images) for images, _ in parts])
    model.train()
    return 100 * (outputs.argmax(1) == split.labels).float().mean().item(), loss(outputs, split.labels).item()


def train(case: Case, name: str, lr: float, data: Dataset, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Prints a line per epoch; the last accuracy and loss."""
    torch.manual_seed(seed)
    model, loss, flat = case.build(), LOSSES[case.loss], case.data == "mnist"
    optimizer = optimizer_for(name, model, lr)
    train = data.train
    batches = Batches(
        train.images, train.labels, case.batch, seed=seed, flat=flat, channels_last=not flat, augment=args.augment
    )
    spent, result = 0.0, (0.0, 0.0)
    assert data.valid is not None
    for epoch in range(args.epochs):
        start, total = clock(), 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            value = loss(model(images), labels)
            value.backward()
            optimizer.step()
            total += value.item() * len(images)
        spent += clock() - start
        result = evaluate(model, data.valid, loss, flat)
        line = f"{name} lr {lr:g} seed {seed} epoch {epoch + 1}: {spent:.0f} s, train loss {total / len(train):.4f}, "
        print(f"{line}valid {result[0]:.2f} % {result[1]:.4f}", flush=True)
    if args.test:
        result = evaluate(model, data.test, loss, flat)
        print(f"{name} lr {lr:g} seed {seed}: test {result[0]:.2f} % {result[1]:.4f}", flush=True)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES, default="fnn")
    parser.add_argument("--data-dir", help="where the data lie; default: RLSPRUNE_DATA")
    parser.add_argument("--ranks", default="16,0", help="comma-separated; 0: P whole; also sgd and adamw")
    parser.add_argument("--lr", help="comma-separated; default: the network's")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train-images", type=int, help="default: all")
    parser.add_argument("--valid-images", type=int, default=5000)
    parser.add_argument("--augment", help="such as crop+flip")
    parser.add_argument("--test", action="store_true", help="the final numbers are of the test images")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = CASES[args.network]
    data = load(case.data, args.data_dir).hold_out(args.valid_images)
    data = data if args.train_images is None else data.take(args.train_images)
    lines = ["| rank | lr | accuracy % | loss |", "|---|---:|---|---|"]
    for name in args.ranks.split(","):
        for lr in map(float, args.lr.split(",")) if args.lr else [case.rate]:
            results = [train(case, name, lr, data, args, seed) for seed in map(int, args.seeds.split(","))]
            cells = []
            for values, digits in zip(zip(*results, strict=True), (2, 4), strict=True):
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.{digits}f}{spread}")
            lines.append(f"| {'whole' if name == '0' else name} | {lr:g} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
