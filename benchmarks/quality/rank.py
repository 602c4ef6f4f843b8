"""Measures the accuracy of P in factors: RLS at several ranks, beside P whole (rank 0 here), momentum SGD and AdamW.

For each seed, all have the same initial weights, batches and epochs. ``valid`` is accuracy and loss on held-out
training images, by which a rank or a rate is chosen; ``test`` is measured only with ``--test``.

    python -m benchmarks.quality.rank --network fnn --epochs 10 --ranks 16,8,0 --seeds 0,1,2 --test --data-dir DATA
    python -m benchmarks.quality.rank --network resnet20 --train-images 10000 --epochs 3 --lr 0.1,0.3 --data-dir DATA
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import rlsprune
from benchmarks.common import clock
from benchmarks.tasks import TASKS, Task
from rlsprune.app.data import Dataset, load


def optimizer_for(name: str, model: nn.Module, lr: float) -> Optimizer:
    """Makes an optimizer by its name on the command line: a rank, 0 for P whole, ``sgd`` or ``adamw``."""
    if name == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    if name == "adamw":
        return AdamW(model.parameters(), lr=lr)
    return rlsprune.RLS(model, lr=lr, fallback_lr=min(0.1, lr), rank=int(name) or None)


def train(task: Task, name: str, lr: float, data: Dataset, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Trains, prints a line per epoch, and returns the last accuracy and loss."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = optimizer_for(name, model, lr)
    batches = task.batches(data.train, seed, args.augment)
    spent, result = 0.0, (0.0, 0.0)
    assert data.valid is not None
    for epoch in range(args.epochs):
        start, total = clock(), 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            value = task.loss(model(images), labels)
            value.backward()
            optimizer.step()
            total += value.item() * len(images)
        spent += clock() - start
        result = task.evaluate(model, data.valid)
        line = f"{name} lr {lr:g} seed {seed} epoch {epoch + 1}: {spent:.0f} s, train loss "
        print(f"{line}{total / len(data.train):.4f}, valid {result[0]:.2f} % {result[1]:.4f}", flush=True)
    if args.test:
        result = task.evaluate(model, data.test)
        print(f"{name} lr {lr:g} seed {seed}: test {result[0]:.2f} % {result[1]:.4f}", flush=True)
    return result


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=TASKS, default="fnn")
    parser.add_argument("--data-dir", help="folder of the data; default: RLSPRUNE_DATA")
    parser.add_argument("--ranks", default="16,0", help="comma-separated; 0: P whole; also sgd and adamw")
    parser.add_argument("--lr", help="comma-separated; default: the network's")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train-images", type=int, help="default: all")
    parser.add_argument("--valid-images", type=int, default=5000)
    parser.add_argument("--augment", help="such as crop+flip")
    parser.add_argument("--test", action="store_true", help="compute the final numbers on the test images")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = TASKS[args.network]
    data = load(task.data, args.data_dir).hold_out(args.valid_images)
    data = data if args.train_images is None else data.take(args.train_images)
    lines = ["| rank | lr | accuracy % | loss |", "|---|---:|---|---|"]
    for name in args.ranks.split(","):
        for lr in map(float, args.lr.split(",")) if args.lr else [task.rate]:
            results = [train(task, name, lr, data, args, seed) for seed in map(int, args.seeds.split(","))]
            cells = []
            for values, digits in zip(zip(*results, strict=True), (2, 4), strict=True):
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.{digits}f}{spread}")
            lines.append(f"| {'whole' if name == '0' else name} | {lr:g} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
