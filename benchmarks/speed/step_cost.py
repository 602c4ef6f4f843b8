"""What a training step costs, and what the optimizer keeps in memory, next to other optimizers.

Prints ratios to the SGD step of the same round: the optimizers take turns, so that a machine that is busy for a while
is busy for all of them. Needs the extra ``benchmarks``.

    python -m benchmarks.speed.step_cost                    # both networks, one thread and all threads
    python -m benchmarks.speed.step_cost --network fnn --threads 1 --rounds 30
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rlsprune
from benchmarks.common import CLASSES, Contender, clock, contenders, state_bytes, train_step
from benchmarks.networks import mini_vgg
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.models import FNN
from rlsprune.optim import functional, layer_step

BATCH = 128
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A network and how long to measure it."""

    title: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    rounds: int
    block: int
    """Consecutive steps of one optimizer in a round. Ten hold one refresh of SOAP and singd, and warm the caches."""


CASES = {
    "fnn": Case("FNN 784-1024-512-10", FNN, (784,), rounds=15, block=10),
    "vgg": Case("mini-VGG, channels_last", mini_vgg, (3, 32, 32), rounds=10, block=1),
}


def batch_for(case: Case) -> tuple[Tensor, Tensor]:
    """A batch of noise: the cost of a step does not depend on the values."""
    images = torch.rand(BATCH, *case.shape)
    if len(case.shape) == 3:
        images = images.to(memory_format=torch.channels_last)
    return images, torch.randint(CLASSES, (BATCH,))


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
        # What Python has to clean up is charged to nobody.
        gc.collect()
    reference = seconds[entrants[0].name]
    print(f"\n{case.title}, batch {BATCH}, {threads()}, {rounds} rounds of {case.block} steps")
    print(f"SGD step: {1e3 * statistics.median(reference):.1f} ms")
    print(f"| {'optimizer':<15} | step, median | step, mean | quartiles | state MiB | state / weights |")
    print(f"|{'-' * 17}|---:|---:|---|---:|---:|")
    weights = sum(p.nbytes for p in runs[0][1].parameters())
    for name, model, optimizers in runs:
        ratios = [mine / sgd for mine, sgd in zip(seconds[name], reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        mean = statistics.fmean(seconds[name]) / statistics.fmean(reference)
        size = sum(map(state_bytes, optimizers))
        print(
            f"| {name:<15} | {middle:.2f} | {mean:.2f} | {low:.2f}–{high:.2f} "
            f"| {size / MIB:.1f} | {size / weights:.2f} |"
        )
        if isinstance(optimizers[0], rlsprune.RLS):
            memory = f"RLS state / (P + velocity): {size / necessary_bytes(model):.4f}"
    print(memory)


def necessary_bytes(model: nn.Module) -> int:
    """P and one velocity per weight, from the layers' shapes alone."""
    inputs = [weight[0].numel() + 1 for weight in model.parameters() if weight.ndim > 1]
    return 4 * (sum(n * n for n in inputs) + sum(p.numel() for p in model.parameters()))


def arithmetic(case: Case) -> None:
    """Prints the multiplications a step needs, the lower limit of its cost."""
    model, (images, _) = case.build(), batch_for(case)
    forward = gradient = backward = precondition = 0
    for module in model:
        outputs = module(images)
        if hasattr(module, "weight"):
            weight = module.weight
            out, n = len(weight), weight[0].numel()
            rows = outputs.numel() // out
            backward += rows * n * out if forward else 0  # nobody needs the gradient of the images
            forward += rows * n * out
            gradient += rows * n * out
            direct_way = out * (n + 1) ** 2
            batch_way = rows * (n + 1) * (n + out) if isinstance(module, nn.Linear) else direct_way
            precondition += min(batch_way, direct_way)
        images = outputs
    sgd = forward + gradient + backward
    print(
        f"arithmetic: SGD {sgd / 1e6:.0f} million multiplications, RLS {precondition / 1e6:.0f} million more for P·∇W: "
        f"{(sgd + precondition) / sgd:.2f}×; "
        f"{(sgd - gradient + precondition) / sgd:.2f}× if ∇W itself were not computed"
    )


def breakdown(case: Case, steps: int) -> None:
    """Prints where the time of an RLS step goes, as parts of a plain forward and backward pass."""
    images, labels = batch_for(case)
    torch.manual_seed(0)
    plain, hooked = case.build(), case.build()
    optimizer = rlsprune.RLS(hooked)
    parts: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            parts[part] += clock() - start
            return result

        return call

    def passes(model: nn.Module) -> None:
        model.zero_grad()
        mean_squared_error(model(images), labels).backward()

    patches = [
        (functional, "gain", "gain u = P x"),
        (layer_step, "match_gradient", "is .grad still Δᵀ X?"),
        (layer_step, "all_finite", "is .grad finite?"),
        (functional, "batch_factors", "X P"),
        (functional, "velocity_step_", "velocity: Δᵀ(X P), or ∇W P"),
        (layer_step, "step_parameters_", "weights"),
        (functional, "rank_one_downdate_", "P update"),
    ]
    originals = [getattr(module, name) for module, name, _ in patches]
    train_step(hooked, [optimizer], images, labels)
    try:
        for (module, name, part), original in zip(patches, originals, strict=True):
            setattr(module, name, timed(part, original))
        for _ in range(steps):
            timed("plain", passes)(plain)
            timed("hooked", passes)(hooked)
            timed("step", optimizer.step)()
    finally:
        for (module, name, _), original in zip(patches, originals, strict=True):
            setattr(module, name, original)
    inside = {part: parts[part] for _, _, part in patches if part in parts}
    rows = {"hooks (mean inputs)": parts["hooked"] - parts["plain"], **inside}
    rows["rest of the step"] = parts["step"] - sum(inside.values())
    print(f"where an RLS step goes, {steps} steps, in % of a plain forward and backward pass:")
    print("; ".join(f"{part} {100 * seconds / parts['plain']:.1f}" for part, seconds in rows.items()))


def threads() -> str:
    """How many threads torch uses, in words."""
    count = torch.get_num_threads()
    return "1 thread" if count == 1 else f"{count} threads"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES, help="default: all")
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
    for case in [CASES[args.network]] if args.network else CASES.values():
        for count in dict.fromkeys(counts):
            torch.set_num_threads(count)
            rounds = args.rounds or case.rounds
            compare(case, entrants, rounds)
            breakdown(case, steps=max(3, rounds * case.block // 3))
        arithmetic(case)


if __name__ == "__main__":
    main()
