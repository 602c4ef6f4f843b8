"""Shows why RLS needs a rate of 0.1 with batch norm: the effect of P on gradients, and RLS beside SGD at equal rates.

For each network it measures, over the first steps, the share of a layer's gradient along its mean input, the factor by
which P shortens the gradient, and the loss of RLS and of SGD with RLS's momentum at several rates.

    python -m benchmarks.quality.batch_norm --data-dir DATA
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import rlsprune
from benchmarks.common import train_step
from benchmarks.tasks import TASKS, Task
from rlsprune.app.data import Dataset, load
from rlsprune.optim.layers import is_layer, mean_input

RATES = (0.1, 0.3, 1.0)


def optimizer_for(kind: str, model: nn.Module, lr: float) -> Optimizer:
    """Makes RLS, or SGD with the same momentum and the same rate for parameters without P."""
    if kind == "RLS":
        return rlsprune.RLS(model, lr=lr, fallback_lr=min(0.1, lr))
    matrices = [p for module in model.modules() if is_layer(module) for p in module.parameters(recurse=False)]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "lr": min(0.1, lr)}]
    return SGD([group for group in groups if group["params"]], lr=lr, momentum=0.5)


def gradients(task: Task, data: Dataset, steps: int, seed: int) -> tuple[float, float]:
    """Computes medians over layers after some steps of RLS: the share along the mean input, and ``|∇W P| / |∇W|``."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = rlsprune.RLS(model, lr=task.rate, fallback_lr=0.1)
    means: dict[str, torch.Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if is_layer(module)}
    for (images, labels), _ in zip(task.batches(data.train, seed), range(steps), strict=False):
        train_step(model, [optimizer], images, labels, task.loss)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda layer, args, name=name: means.update(
                {name: mean_input(layer, args[0].detach(), torch.float64)[0][0]}
            )
        )
    optimizer.zero_grad()
    task.loss(model(images), labels).backward()
    shares, shortened = [], []
    for name, layer in layers.items():
        own = [
            p.grad.flatten(1) if p.ndim > 1 else p.grad.unsqueeze(1)
            for p in (layer.weight, layer.bias)
            if p is not None
        ]
        gradient = torch.cat(own, 1).double()
        along = gradient @ (means[name] / means[name].norm())
        shares.append(float(along.norm() / gradient.norm()))
        shortened.append(float((gradient @ optimizer.inverse(name).double()).norm() / gradient.norm()))
    return statistics.median(shares), statistics.median(shortened)


def losses(task: Task, data: Dataset, kind: str, lr: float, steps: int, seed: int) -> str:
    """Trains and formats the mean loss over the first and the last quarter of the steps; a dash if it diverged."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = optimizer_for(kind, model, lr)
    seen: list[float] = []
    try:
        for (images, labels), _ in zip(task.batches(data.train, seed), range(steps), strict=False):
            seen.append(float(train_step(model, [optimizer], images, labels, task.loss)))
    except FloatingPointError:  # RLS raises it
        return "–"
    quarter = max(1, len(seen) // 4)
    return f"{statistics.fmean(seen[:quarter]):.3f}, {statistics.fmean(seen[-quarter:]):.3f}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of the data; default: RLSPRUNE_DATA")
    parser.add_argument("--networks", default="fnn,vgg,resnet20")
    parser.add_argument("--steps", type=int, default=60, help="twice as many for the FNN, a fifth for the mini-VGG")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = " | ".join(f"{kind} {rate:g}" for kind in ("RLS", "SGD") for rate in RATES)
    print(f"| network | along the mean input | shortened to | {head} |\n|---|---:|---:|{'---|' * 2 * len(RATES)}")
    for name in args.networks.split(","):
        task = TASKS[name]
        data = load(task.data, args.data_dir).take(20_000)
        steps = {"fnn": 2 * args.steps, "vgg": args.steps // 5}.get(name, args.steps)
        share, shortened = gradients(task, data, steps // 2, args.seed)
        cells = [losses(task, data, kind, rate, steps, args.seed) for kind in ("RLS", "SGD") for rate in RATES]
        print(f"| {name}, {steps} steps | {share:.2f} | {shortened:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
