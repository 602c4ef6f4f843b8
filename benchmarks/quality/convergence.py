"""Measures accuracy and loss against time and steps, for each optimizer at the best of three rates.

On MNIST it trains the paper's network with the paper's loss, and measures accuracy on held-out and test images four
times an epoch. On the networks for CIFAR-10 it records the loss of each batch before it is trained on; in the first
epoch these batches are new. The rates are tried with the first seed. MNIST's are chosen by the final held-out accuracy,
the others by the final loss; the chosen rate runs with the other seeds too. All get the same epochs and seconds,
whichever end first; with one thread, seconds are processor time. A run that is in OUT.json is not repeated. Needs the
extras ``benchmarks`` and ``cli``.

    python -m benchmarks.quality.convergence --data-dir DATA --out docs/results/convergence
    python -m benchmarks.quality.convergence --network resnet20 --seeds 0,1,2 --max-seconds 30 --data-dir DATA
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.common import Contender, clock, contenders, train_step
from benchmarks.tasks import TASKS, Task
from rlsprune.app.data import Dataset, load

VALIDATION_IMAGES = 5000
# Steps after which to evaluate, beside four times an epoch: the optimizers differ most in the beginning.
EARLY = (20, 50, 100, 150, 200, 250, 300, 350)
SMOOTHED = 20
"""Number of batches whose losses are averaged."""
EVERY = 5
"""Number of steps between two values of the averaged loss."""


@dataclass
class Curve:
    """One training run, with a point per evaluation and the loss of the batches."""

    name: str
    lr: float
    seed: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    """Accuracy in % on the held-out training images."""
    test: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """Loss on the test images."""
    progress: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, seconds, and the mean loss of the last batches, each measured before it was trained on."""


def train(
    task: Task, contender: Contender, lr: float, data: Dataset, epochs: int, max_seconds: float, seed: int
) -> Curve:
    """Trains from the seed's weights and batches; only training is timed. Stops early if the loss is not finite."""
    torch.manual_seed(seed)
    model = task.build()
    optimizers = contender.build(model, lr)
    batches = task.batches(data.train, seed)
    curve = Curve(contender.name, lr, seed)
    spent, step, last = 0.0, 0, epochs * len(batches)
    losses: list[torch.Tensor] = []

    def look() -> None:
        """Adds a point."""
        assert data.valid is not None
        valid, _ = task.evaluate(model, data.valid)
        test, loss = task.evaluate(model, data.test)
        curve.steps.append(step)
        curve.seconds.append(spent)
        curve.valid.append(valid)
        curve.test.append(test)
        curve.loss.append(loss)

    for _ in range(epochs):
        for images, labels in batches:
            start = clock()
            try:
                losses.append(train_step(model, optimizers, images, labels, task.loss))
            except FloatingPointError:  # RLS raises it
                losses.append(torch.tensor(math.nan))
            spent, step = spent + clock() - start, step + 1
            end = step == last or spent >= max_seconds
            if step % EVERY == 0 or end:
                curve.progress.append((step, spent, statistics.fmean(map(float, losses[-SMOOTHED:]))))
            diverged = not math.isfinite(losses[-1])
            due = step in EARLY or step % max(1, len(batches) // 4) == 0
            if (task.flat and due) or end or diverged:
                look()
            if end or diverged:
                return curve
    return curve


def score(task: Task, curve: Curve) -> float:
    """Returns the score by which a rate is chosen; higher is better."""
    final = curve.progress[-1][2] if curve.progress else math.nan
    value = curve.valid[-1] if task.flat else -final
    return value if math.isfinite(value) else -math.inf


def best(task: Task, curves: list[Curve]) -> Curve:
    """Returns the best of an optimizer's runs with the first seed."""
    first = [curve for curve in curves if curve.seed == curves[0].seed]
    return max(first, key=lambda curve: score(task, curve))


def seconds_to(curve: Curve, accuracy: float) -> float:
    """Returns the seconds until this test accuracy was first reached."""
    pairs = zip(curve.test, curve.seconds, strict=True)
    return next((seconds for test, seconds in pairs if test >= accuracy), math.inf)


def seconds_to_loss(curve: Curve, loss: float) -> float:
    """Returns the seconds until the loss of the batches first fell to this level."""
    return next((seconds for step, seconds, value in curve.progress if step >= SMOOTHED and value <= loss), math.inf)


def mean(values: list[float], digits: int) -> str:
    """Formats mean and deviation, or a dash if a value is missing."""
    if not all(map(math.isfinite, values)):
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def table(task: Task, tried: dict[str, list[Curve]]) -> str:
    """Formats a Markdown table with one line per optimizer at its best rate."""
    chosen = {name: best(task, curves) for name, curves in tried.items()}
    same = {name: [c for c in curves if c.lr == chosen[name].lr] for name, curves in tried.items()}
    if task.flat:
        columns = ["test accuracy", "test loss", "s to 97 %", "s to 98 %", "s to 98.5 %"]
    else:
        reference = next(iter(same.values()))
        levels = [max(c.progress[-1][2] for c in reference), min(c.progress[-1][2] for c in reference)]
        columns = ["last loss", *(f"s to {level:.3f}" for level in dict.fromkeys(levels))]
    lines = [
        f"| optimizer | lr | seeds | steps | s | {' | '.join(columns)} |",
        f"|---|---|{'---:|' * (3 + len(columns))}",
    ]
    for name, runs in same.items():
        ends = [c.progress[-1] for c in runs if c.progress]
        head = f"| {name} | {chosen[name].lr:g} | {len(runs)} | {mean([e[0] for e in ends], 0)} "
        cells = [mean([end[1] for end in ends], 0)]
        if task.flat:
            cells += [mean([c.test[-1] for c in runs], 2), mean([c.loss[-1] for c in runs], 4)]
            cells += [mean([seconds_to(c, accuracy) for c in runs], 1) for accuracy in (97, 98, 98.5)]
        else:
            cells.append(mean([end[2] for end in ends], 3))
            cells += [mean([seconds_to_loss(c, level) for c in runs], 1) for level in dict.fromkeys(levels)]
        lines.append(f"{head}| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(task: Task, tried: dict[str, list[Curve]], path: Path) -> None:
    """Plots the best run of each optimizer against time and steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for curve in (best(task, curves) for curves in tried.values()):
        style = {"label": f"{curve.name}, lr {curve.lr:g}", "linewidth": 2.2 if curve.name == "RLS" else 1.1}
        steps, seconds, losses = zip(*curve.progress, strict=True)
        values = curve.test if task.flat else losses
        panels[0].plot(curve.seconds if task.flat else seconds, values, **style)
        panels[1].plot(curve.steps if task.flat else steps, values, **style)
    panels[0].set(xscale="log", xlabel="training time, s", ylabel="test accuracy, %" if task.flat else "loss")
    panels[1].set(xscale="log", xlabel=f"steps of {task.batch} images")
    if task.flat:
        panels[0].set(ylim=(88, 99))
    panels[1].legend(fontsize=7)
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def run(args: argparse.Namespace, task: Task, entrants: list[Contender]) -> dict[str, list[Curve]]:
    """Trains with every optimizer at every rate, and writes each finished curve at once."""
    few = args.quick or not task.flat
    data = load(task.data, args.data_dir).hold_out(500 if few else VALIDATION_IMAGES)
    data = data if task.flat else dataclasses.replace(data, test=data.test.select(torch.arange(500)))
    path = args.out.with_suffix(".json")
    curves = [Curve(**curve) for curve in json.loads(path.read_text())] if path.exists() else []
    first, *others = map(int, args.seeds.split(","))

    def once(contender: Contender, lr: float, seed: int) -> Curve:
        same = [c for c in curves if (c.name, c.lr, c.seed) == (contender.name, lr, seed)]
        if same:
            return same[0]
        curve = train(task, contender, lr, data, args.epochs, args.max_seconds, seed)
        step, seconds, loss = curve.progress[-1] if curve.progress else (0, 0.0, math.nan)
        line = f"{curve.name} lr {lr:g} seed {seed}: {step} steps, {seconds:.1f} s, loss {loss:.4f}"
        print(f"{line}, valid {curve.valid[-1]:.2f}, test {curve.test[-1]:.2f}", flush=True)
        curves.append(curve)
        path.write_text(json.dumps([asdict(curve) for curve in curves]))
        return curve

    tried: dict[str, list[Curve]] = {}
    for contender in entrants:
        rates = (contender.default,) if args.quick or args.defaults else contender.grid
        tried[contender.name] = [once(contender, lr, first) for lr in rates]
    repeated = args.repeat.lower().split(",")
    for contender in entrants:
        if contender.name.lower().startswith(tuple(repeated)):
            lr = best(task, tried[contender.name]).lr
            tried[contender.name] += [once(contender, lr, seed) for seed in others]
    return tried


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=TASKS, default="fnn")
    parser.add_argument("--data-dir", help="folder of the data; default: RLSPRUNE_DATA")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-seconds", type=float, default=60, help="seconds of training per run")
    parser.add_argument("--seeds", default="0", help="comma-separated; the first one chooses the rates")
    parser.add_argument("--repeat", default="", help="comma-separated beginnings of the names that run with all seeds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="comma-separated beginnings of optimizer names")
    parser.add_argument("--defaults", action="store_true", help="try only the rate of its paper or library")
    parser.add_argument("--quick", action="store_true", help="the embedded digits, one epoch, default learning rates")
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="writes OUT.png and OUT.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = TASKS[args.network]
    if args.quick:
        task, args.epochs = dataclasses.replace(task, data="digits"), 1

    # benchmarks.quality.rank measures P whole. Muon is for matrices between hidden layers.
    matrices = sum(p.ndim == 2 for p in task.build().parameters())
    left_out = ("RLS, P whole", *(["Muon (float32)"] if matrices < 2 else []))
    entrants = [c for c in contenders(rate=task.rate) if c.name not in left_out]
    if args.only:
        entrants = [c for c in entrants if c.name.lower().startswith(tuple(args.only.lower().split(",")))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tried = run(args, task, entrants)
    print(table(task, tried))
    plot(task, tried, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
