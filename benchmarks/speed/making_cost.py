"""Measures the time of making a Pruner, in passes and relative to torch-pruning's build and step.

A *pass* is one forward and backward pass of the given example inputs, in training mode. Making a Pruner traces the
channels, proves every group by separate runs on the first two inputs of a batch, and counts FLOPs. Times are processor
time of one thread, the least of several rounds.

    python -m benchmarks.speed.making_cost
    python -m benchmarks.speed.making_cost --networks FNN ResNet-20 --batches 1
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rlsprune
from benchmarks.common import clock
from benchmarks.networks import mini_vgg, mobilenet
from benchmarks.quality.zoo import families
from benchmarks.speed.prune_cost import rival
from rlsprune.app.models import FNN, ResNet
from rlsprune.model.calls import as_call, output_tensors

OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "FNN": (FNN, (784,)),
    "mini-VGG": (mini_vgg, (3, 32, 32)),
    "ResNet-20": (partial(ResNet, 20), (3, 32, 32)),
    "ResNet-56": (partial(ResNet, 56), (3, 32, 32)),
    "MobileNetV2": (mobilenet, (3, 32, 32)),
}
OTHERS = ("transformers/Bert", "transformers/Llama", "transformers/ViT")


def network(name: str) -> tuple[nn.Module, Any]:
    """Builds a network, and one input."""
    torch.manual_seed(0)
    if name in OWN:
        build, shape = OWN[name]
        return build(), torch.rand(1, *shape)
    return families(name.partition("/")[0])[name]()


def batch_of(example: Any, size: int) -> Any:
    """Repeats one input to a batch of this size."""
    if isinstance(example, dict):
        return {key: batch_of(value, size) for key, value in example.items()}
    return example.expand(size, *example.shape[1:]).clone() if isinstance(example, Tensor) else example


def least(work: Callable[[], object], rounds: int) -> float:
    """Measures the least processor time in seconds."""
    found = []
    for _ in range(rounds + 1):  # the first round imports and allocates
        gc.collect()
        start = clock()
        work()
        found.append(clock() - start)
    return min(found[1:])


def one_pass(model: nn.Module, example: Any) -> None:
    """Runs a forward and a backward pass."""
    args, kwargs = as_call(example)
    model.zero_grad(set_to_none=True)
    output_tensors(model(*args, **kwargs))[0].sum().backward()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[*OWN, *OTHERS], help="also those of benchmarks.quality.zoo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | batch | a pass, ms | making, ms | making, passes | over torch-pruning's build + step |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in args.networks:
        model, single = network(name)
        model.train()
        for size in args.batches:
            example = batch_of(single, size)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            passed = least(lambda model=model, example=example: one_pass(model, example), args.rounds)
            made = least(
                lambda model=model, optimizer=optimizer, example=example: rlsprune.Pruner(
                    model, optimizer, example, criterion="l1", compensate=False
                ),
                args.rounds,
            )
            theirs = [rival(copy.deepcopy(model), example)[0] for _ in range(args.rounds + 1 if name in OWN else 0)][1:]
            beside = f"{made / min(theirs):.1f}" if theirs else "–"
            figures = f"{1e3 * passed:.0f} | {1e3 * made:.0f} | {made / passed:.0f} | {beside}"
            print(f"| {name} | {size} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
