"""Learning rates for cross-entropy, batch norm and pretrained weights, on the embedded digits.

`python -m benchmarks.quality.settings` prints the tables of docs/settings.md: test accuracy in % after a few epochs on
2,000 of the digits, one seed, one thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import rlsprune
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data import Batches, load
from rlsprune.training.loop import Loss, evaluate

RATES = (1.0, 0.3, 0.1, 0.03, 0.01)


def mlp() -> nn.Module:
    """Builds a fully-connected network."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn(norm: bool) -> nn.Module:
    """Builds a network of three convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 9, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "CNN": lambda: cnn(False),
    "CNN with batch norm": lambda: cnn(True),
}


class Digits:
    """Some of the embedded digits."""

    def __init__(self, count: int) -> None:
        data = load("digits").take(count)
        self.train, self.test = data.train, data.test

    def train_epoch(self, batches: Batches, model: nn.Module, optimizer: Optimizer, loss_function: Loss) -> float:
        """Trains for one epoch and returns the mean loss."""
        losses = []
        model.train()
        for images, labels in batches:
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def batches(self) -> Batches:
        """Returns shuffled training batches."""
        return Batches(self.train.images, self.train.labels, 64, seed=0)

    def accuracy(self, model: nn.Module) -> float:
        """Computes the accuracy on the test digits."""
        split = Batches(self.test.images, self.test.labels, 500, shuffle=False)
        return evaluate(model, split, cross_entropy).accuracy


def trained(digits: Digits, build: Callable[[], nn.Module], make: Callable[[nn.Module], Optimizer], loss: Loss) -> str:
    """Trains for five epochs and returns the accuracy, or "diverges"."""
    torch.manual_seed(0)
    model = build()
    optimizer, batches = make(model), digits.batches()
    try:
        for _ in range(5):
            if not digits.train_epoch(batches, model, optimizer, loss) < 1e3:
                return "diverges"
    except FloatingPointError:
        return "diverges"
    return f"{digits.accuracy(model):.1f}"


def from_scratch(digits: Digits) -> None:
    """Prints the first table, of training from scratch."""
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        f"RLS {rate:g}": lambda model, rate=rate: rlsprune.RLS(model, lr=rate, fallback_lr=min(0.1, rate))
        for rate in RATES
    }
    makers["AdamW 0.001"] = lambda model: AdamW(model.parameters(), lr=1e-3)
    makers["SGD 0.1"] = lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9)
    print(f"| network | loss | {' | '.join(makers)} |\n|---|---|{'---:|' * len(makers)}")
    for name, build in NETWORKS.items():
        for loss_name, loss in (("squared error", mean_squared_error), ("cross-entropy", cross_entropy)):
            cells = [trained(digits, build, make, loss) for make in makers.values()]
            print(f"| {name} | {loss_name} | {' | '.join(cells)} |", flush=True)


def pretrained(digits: Digits) -> None:
    """Prints the second table, of a network trained by AdamW and pruned to a fifth of its parameters in 12 epochs."""
    torch.manual_seed(0)
    source = cnn(True)
    optimizer, batches = AdamW(source.parameters(), lr=1e-3), digits.batches()
    for _ in range(8):
        digits.train_epoch(batches, source, optimizer, cross_entropy)
    print(f"\nPretrained: {digits.accuracy(source):.1f} %\n\n| optimizer | after 1 epoch | after 12 | parameters |")
    print("|---|---:|---:|---:|")
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        f"RLS {rate:g}": lambda model, rate=rate: rlsprune.RLS(model, lr=rate, fallback_lr=min(0.1, rate))
        for rate in RATES[1:]
    }
    makers |= {
        f"AdamW {rate:g}": lambda model, rate=rate: AdamW(model.parameters(), lr=rate) for rate in (1e-3, 3e-4, 1e-4)
    }
    makers |= {
        f"SGD {rate:g}": lambda model, rate=rate: SGD(model.parameters(), lr=rate, momentum=0.9)
        for rate in (1e-1, 1e-2)
    }
    for name, make in makers.items():
        model = copy.deepcopy(source)
        print(f"| {name} | {' | '.join(pruned(digits, model, make(model)))} |", flush=True)


def knobs(digits: Digits) -> None:
    """Prints the tables of k and λ, and of ξ and q, with the MLP and cross-entropy at η = 0.3."""
    print("\n| k | λ = 1 | λ = 0.999 | λ = 0.99 |\n|---|---:|---:|---:|")
    for k in (0.01, 0.1, 1.0):
        cells = [
            trained(
                digits,
                mlp,
                lambda model, k=k, forgetting=forgetting: rlsprune.RLS(
                    model, lr=0.3, mean_scale=k, forgetting=forgetting
                ),
                cross_entropy,
            )
            for forgetting in (1.0, 0.999, 0.99)
        ]
        print(f"| {k:g} | {' | '.join(cells)} |", flush=True)
    print("\n| ξ | q = 0 | q = 1 | q = 4 |\n|---|---:|---:|---:|")
    for ratio in (0.1, 0.25, 0.4, 0.6):
        cells = []
        for warmup in (0, 1, 4):
            torch.manual_seed(0)
            model = mlp()
            _, accuracy, left = pruned(digits, model, rlsprune.RLS(model, lr=0.3), ratio, warmup, {"params": 0.05})
            cells.append(f"{accuracy} at {left}")
        print(f"| {ratio:g} | {' | '.join(cells)} |", flush=True)


def pruned(
    digits: Digits,
    model: nn.Module,
    optimizer: Optimizer,
    ratio: float = 0.25,
    warmup_epochs: int = 1,
    target: dict[str, float] | None = None,
) -> list[str]:
    """Prunes and returns accuracy after one epoch and at the end, and the share of the parameters that is left."""
    example: Tensor = digits.test.images[:1] / 255
    before = sum(p.numel() for p in model.parameters())
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        example,
        ratio=ratio,
        criterion="obs",
        warmup_epochs=warmup_epochs,
        tolerance=0.05,
        target=target or {"params": 0.2},
    )
    batches, first = digits.batches(), ""
    try:
        for epoch in range(12):
            loss = digits.train_epoch(batches, model, optimizer, cross_entropy)
            first = first or f"{digits.accuracy(model):.1f}"
            if epoch >= 9:
                pruner.stop()  # the last epochs are for recovery
            pruner.step(loss)
        pruner.finish()
    except (FloatingPointError, ValueError):
        return [first or "diverges", "diverges", ""]
    share = 100 * sum(p.numel() for p in model.parameters()) / before
    return [first, f"{digits.accuracy(model):.1f}", f"{share:.0f} %"]


TABLES: dict[str, Callable[[Digits], None]] = {"scratch": from_scratch, "pretrained": pretrained, "knobs": knobs}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--only", choices=TABLES, help="one of the tables; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, table in TABLES.items():
        if options.only in (None, name):
            table(Digits(options.images))


if __name__ == "__main__":
    main()
