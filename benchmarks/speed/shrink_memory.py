"""Measures the memory of `rlsprune.shrink` beyond the network and its copy, on layers of a ResNet-50 at 224 px.

Memory peaks where maps are largest, because of forward passes that are held, and where layers have the most inputs,
because of the matrices of these. So both ends of the network are measured, each in its own process: the stem with the
first block, on images of 3×224×224, and the last block, on maps of 2048×7×7. Between them both causes are smaller.

    python -m benchmarks.speed.shrink_memory
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

import rlsprune
from rlsprune.app.models.imagenet import resnet50

PARTS: dict[str, tuple[Callable[[nn.Sequential], nn.Module], tuple[int, ...]]] = {
    "stem and first block": (lambda net: net[:5], (3, 224, 224)),
    "last block": (lambda net: net[-4:], (2048, 7, 7)),
}


def megabytes(part: str, inputs: int) -> float:
    """Measures the peak of this process while it shrinks, beyond its memory after a forward pass and a network copy."""
    torch.manual_seed(0)
    choose, shape = PARTS[part]
    model = choose(resnet50()).eval()
    batches = [torch.randn(8, *shape) for _ in range(inputs // 8)]
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    with torch.no_grad():
        model(batches[0][:1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    rlsprune.shrink(model, batches, target={"flops": 0.5})
    # The network's size is subtracted for shrink's copies of it: one to compare with, one to restore from.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before - size


def main() -> None:
    """Prints the peak of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--inputs", type=int, default=160, help="images to calibrate on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        print(f"{options.part}: {megabytes(options.part, options.inputs):.0f} MB beyond the two networks", flush=True)
        return
    for part in PARTS:
        command = [sys.executable, "-m", "benchmarks.speed.shrink_memory", "--part", part]
        subprocess.run([*command, "--inputs", str(options.inputs)], check=True)


if __name__ == "__main__":
    main()
