"""Test accuracy against wall-clock and against steps on full MNIST, the paper's network and loss, for each optimizer.

Every optimizer runs at three learning rates, of which the validation images choose. All get the same number of epochs
and the same number of seconds, whichever ends first; with one thread seconds are the process's own. A run that is in
OUT.json is not repeated. Needs the extras ``benchmarks`` and ``cli``.

    python -m benchmarks.quality.convergence --data-dir DATA --out docs/results/convergence
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import Contender, clock, contenders, train_step
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data import Batches, Dataset, Split, load
from rlsprune.app.models import FNN

VALIDATION_IMAGES = 5000
BATCH = 128
# Evaluations after this many steps, and four times an epoch: the beginning is where the optimizers differ most.
EARLY = (10, 20, 50, 100, 150, 200, 250, 300, 350)


@dataclass
class Curve:
    """One training run: a point per evaluation."""

    name: str
    lr: float
    seed: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    """Accuracy in % on the held-out training images."""
    test: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """The paper's J on the test images."""


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy in % and loss."""
    outputs = torch.cat([model(part.flatten(1).float().div_(255)) for part in split.images.split(1000)])
    accuracy = (outputs.argmax(1) == split.labels).float().mean().item()
    return 100 * accuracy, mean_squared_error(outputs, split.labels).item()


def train(contender: Contender, lr: float, data: Dataset, epochs: int, max_seconds: float, seed: int) -> Curve:
    """Trains from the seed's weights and batches; only training is timed. Stops early if the loss is not finite."""
    torch.manual_seed(seed)
    model = FNN()
    optimizers = contender.build(model, lr)
    batches = Batches(data.train.images, data.train.labels, BATCH, seed=seed, flat=True)
    curve = Curve(contender.name, lr, seed)
    spent, step, last = 0.0, 0, epochs * len(batches)

    def look() -> bool:
        """Adds a point; whether to go on."""
        valid, _ = evaluate(model, data.valid)
        test, loss = evaluate(model, data.test)
        curve.steps.append(step)
        curve.seconds.append(spent)
        curve.valid.append(valid)
        curve.test.append(test)
        curve.loss.append(loss)
        return math.isfinite(loss) and spent < max_seconds

    look()
    for _ in range(epochs):
        for images, labels in batches:
            start = clock()
            train_step(model, optimizers, images, labels)
            spent, step = spent + clock() - start, step + 1
            due = step in EARLY or step % max(1, len(batches) // 4) == 0 or step == last or spent >= max_seconds
            if due and not look():
                return curve
    return curve


def choose(curves: list[Curve], contender: Contender) -> list[tuple[str, Curve]]:
    """The run at the default learning rate and, if it is another, the best on the validation images."""
    default = next(curve for curve in curves if curve.lr == contender.default)
    best = max(curves, key=lambda curve: curve.valid[-1])
    return [("default", default)] + ([("best", best)] if best is not default else [])


def reached(curve: Curve, accuracy: float) -> str:
    """Seconds and steps until the test accuracy was first seen."""
    for test, seconds, step in zip(curve.test, curve.seconds, curve.steps, strict=True):
        if test >= accuracy:
            return f"{seconds:.1f} s, {step}"
    return "–"


def table(chosen: list[tuple[str, Curve]]) -> str:
    """Markdown, one line per run."""
    lines = [
        "| optimizer | lr | steps | seconds | test accuracy | test loss | to 97 % (s, steps) | to 98 % | to 98.5 % |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, c in chosen:
        lines.append(
            f"| {c.name} | {c.lr:g} ({kind}) | {c.steps[-1]} | {c.seconds[-1]:.0f} | {c.test[-1]:.2f} "
            f"| {c.loss[-1]:.4f} | {reached(c, 97)} | {reached(c, 98)} | {reached(c, 98.5)} |"
        )
    return "\n".join(lines)


def plot(chosen: list[tuple[str, Curve]], path: Path) -> None:
    """Both panels, the better of each optimizer's two runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best = {curve.name: curve for _, curve in chosen}  # the chosen learning rate comes after the default one
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for curve in best.values():
        style = {"label": f"{curve.name}, lr {curve.lr:g}", "linewidth": 2.2 if curve.name == "RLS" else 1.1}
        panels[0].plot(curve.seconds[1:], curve.test[1:], **style)
        panels[1].plot(curve.steps[1:], curve.test[1:], **style)
    panels[0].set(xscale="log", xlabel="training time, s", ylabel="test accuracy, %", ylim=(88, 99))
    panels[1].set(xscale="log", xlabel="steps of 128 images")
    panels[1].legend(fontsize=7, loc="lower right")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def run(args: argparse.Namespace, entrants: list[Contender]) -> list[Curve]:
    """Trains with every optimizer at every learning rate, and writes each curve as it is done."""
    data = load("digits") if args.quick else load("mnist", args.data_dir)
    data = data.hold_out(500 if args.quick else VALIDATION_IMAGES, seed=args.seed)
    epochs = 1 if args.quick else args.epochs
    path = args.out.with_suffix(".json")
    curves = [Curve(**curve) for curve in json.loads(path.read_text())] if path.exists() else []
    done = {(curve.name, curve.lr) for curve in curves}
    for contender in entrants:
        for lr in (contender.default,) if args.quick else contender.grid:
            if (contender.name, lr) in done:
                continue
            curve = train(contender, lr, data, epochs, args.max_seconds, args.seed)
            print(
                f"{curve.name} lr {lr:g}: {curve.steps[-1]} steps, {curve.seconds[-1]:.1f} s, valid "
                f"{curve.valid[-1]:.2f}, test {curve.test[-1]:.2f}",
                flush=True,
            )
            curves.append(curve)
            path.write_text(json.dumps([asdict(curve) for curve in curves]))
    return curves


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="where MNIST lies; default: RLSPRUNE_DATA")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-seconds", type=float, default=60, help="of training, per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="comma-separated beginnings of optimizer names")
    parser.add_argument("--quick", action="store_true", help="the embedded digits, one epoch, default learning rates")
    parser.add_argument("--merge", type=Path, nargs="+", help="table and plot of earlier OUT.json files, no training")
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="writes OUT.png and OUT.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    entrants = contenders()
    if args.only:
        entrants = [c for c in entrants if c.name.lower().startswith(tuple(args.only.lower().split(",")))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.merge:
        curves = [Curve(**curve) for path in args.merge for curve in json.loads(path.read_text())]
    else:
        curves = run(args, entrants)
    tried = {c.name: [curve for curve in curves if curve.name == c.name] for c in entrants}
    chosen = [pair for c in entrants if tried[c.name] for pair in choose(tried[c.name], c)]
    print(table(chosen))
    plot(chosen, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
