"""Measures the time of a training step and the memory of the optimizer's state, beside other optimizers.

Prints ratios to the SGD step of the same round. The optimizers take turns, so that other load on the machine slows all
of them. Needs the extra ``benchmarks``.

    python -m benchmarks.speed.step_cost                    # FNN and mini-VGG, one thread and all threads
    python -m benchmarks.speed.step_cost --network fnn --threads 1 --rounds 30
    python -m benchmarks.speed.step_cost --network wide --threads 1  # VGG-16's 25,088 × 4,096 layer; takes 5 GB
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rlsprune
from benchmarks.common import CLASSES, Contender, clock, contenders, state_bytes, train_step
from benchmarks.networks import mini_vgg
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.models import FNN, ResNet

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A network and the length of its measurement."""

    title: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    rounds: int
    block: int
    """Consecutive steps of one optimizer in a round. Ten include one refresh of SOAP and singd, and warm the caches."""
    batch: int = 128
    only: tuple[str, ...] | None = None
    """The optimizers beside SGD that can be measured on it; None for all."""


def resnet20() -> nn.Sequential:
    """Builds ResNet-20, with weights in the memory format of its images."""
    return ResNet(20).to(memory_format=torch.channels_last)


def wide_layer() -> nn.Sequential:
    """Builds the first fully-connected layer of VGG-16 as a network; P whole would take 2.5 GB and minutes."""
    return nn.Sequential(nn.Linear(25_088, 4_096))


CASES = {
    "fnn": Case("FNN 784-1024-512-10", FNN, (784,), rounds=15, block=10),
    "vgg": Case("mini-VGG, channels_last", mini_vgg, (3, 32, 32), rounds=10, block=1),
    "resnet": Case("ResNet-20, channels_last", resnet20, (3, 32, 32), rounds=6, block=1),
    "wide": Case("25,088 × 4,096", wide_layer, (25_088,), rounds=6, block=1, batch=256, only=("RLS",)),
}


def batch_for(case: Case) -> tuple[Tensor, Tensor]:
    """Draws a batch of noise; the cost of a step does not depend on the values."""
    images = torch.rand(case.batch, *case.shape)
    if len(case.shape) == 3:
        images = images.to(memory_format=torch.channels_last)
    return images, torch.randint(CLASSES, (case.batch,))


def compare(case: Case, entrants: list[Contender], rounds: int) -> None:
    """Prints step time and state memory of every optimizer, as ratios."""
    images, labels = batch_for(case)
    runs = []
    for entrant in entrants:
        torch.manual_seed(0)
        model = case.build()
        runs.append((entrant.name, model, entrant.build(model, entrant.default)))
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name, model, optimizers in runs:
            start = clock()
            for _ in range(case.block):
                train_step(model, optimizers, images, labels)
            if turn:  # the first round creates the states
                seconds[name].append((clock() - start) / case.block)
        # Garbage collection is not timed.
        gc.collect()
    reference = seconds[entrants[0].name]
    print(f"\n{case.title}, batch {case.batch}, {threads()}, {rounds} rounds of {case.block} steps")
    print(f"SGD step: {1e3 * statistics.median(reference):.1f} ms")
    print(f"| {'optimizer':<15} | step, median | step, mean | quartiles | state MiB | state / weights |")
    print(f"|{'-' * 17}|---:|---:|---|---:|---:|")
    weights = sum(p.nbytes for p in runs[0][1].parameters())
    for name, _, optimizers in runs:
        ratios = [mine / sgd for mine, sgd in zip(seconds[name], reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        mean = statistics.fmean(seconds[name]) / statistics.fmean(reference)
        size = sum(map(state_bytes, optimizers))
        print(
            f"| {name:<15} | {middle:.2f} | {mean:.2f} | {low:.2f}–{high:.2f} "
            f"| {size / MIB:.1f} | {size / weights:.2f} |"
        )


def breakdown(case: Case, steps: int) -> None:
    """Prints the time that RLS adds to a plain forward and backward pass, by its hooks in the pass and by its step."""
    images, labels = batch_for(case)
    torch.manual_seed(0)
    plain, hooked = case.build(), case.build()
    optimizer = rlsprune.RLS(hooked)
    train_step(hooked, [optimizer], images, labels)
    spent: dict[str, float] = defaultdict(float)

    def forward_and_backward(model: nn.Module) -> None:
        model.zero_grad()
        mean_squared_error(model(images), labels).backward()

    for _ in range(steps):
        for part, work in {
            "plain": lambda: forward_and_backward(plain),
            "hooked": lambda: forward_and_backward(hooked),
            "step": optimizer.step,
        }.items():
            start = clock()
            work()
            spent[part] += clock() - start
    hooks, step = (100 * seconds / spent["plain"] for seconds in (spent["hooked"] - spent["plain"], spent["step"]))
    print(f"RLS adds to a forward and backward pass, {steps} steps: hooks {hooks:.1f} %, step {step:.1f} %")


def threads() -> str:
    """Returns the number of torch's threads in words."""
    count = torch.get_num_threads()
    return "1 thread" if count == 1 else f"{count} threads"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES, help="default: fnn and vgg")
    parser.add_argument("--threads", choices=("1", "all", "both"), default="both")
    parser.add_argument("--rounds", type=int, help="default: 15 for the FNN, 10 for the VGG")
    parser.add_argument("--only", help="comma-separated beginnings of optimizer names, beside SGD")
    parser.add_argument("--muon-bfloat16", action="store_true", help="torch's Muon as it is: minutes on an older CPU")
    args = parser.parse_args()
    entrants = contenders(args.muon_bfloat16)
    if args.only:
        wanted = tuple(args.only.lower().split(","))
        entrants = entrants[:1] + [c for c in entrants[1:] if c.name.lower().startswith(wanted)]
    counts = {"1": [1], "all": [os.cpu_count() or 1], "both": [1, os.cpu_count() or 1]}[args.threads]
    for case in [CASES[name] for name in ([args.network] if args.network else ("fnn", "vgg"))]:
        for count in dict.fromkeys(counts):
            torch.set_num_threads(count)
            rounds = args.rounds or case.rounds
            able = [c for c in entrants[1:] if case.only is None or c.name in case.only]
            compare(case, [entrants[0], *able], rounds)
            breakdown(case, steps=max(3, rounds * case.block // 3))


if __name__ == "__main__":
    main()
