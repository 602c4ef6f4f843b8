"""Measures what one event of `rlsprune.Pruner` costs a trained ResNet, without further training.

Each ξ has two rows: an event that takes ξ of every layer and refits each layer to its own outputs, as in networks
without batch norms; and one that is chosen and refitted as a whole, on the last 512 of the same images. The columns are
accuracy in evaluation mode and in training mode (batches of 500), and the event's processor time relative to one
forward pass over its calibration images.

``--training`` instead trains a ResNet-8 on the embedded digits by RLS with all defaults of the pruner, and prints
accuracy before and after each event, and at the end.

    python -m benchmarks.quality.events WEIGHTS --data-dir DATA
    python -m benchmarks.quality.events --training --seeds 0,1,2
    python -m benchmarks.quality.events --quick
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rlsprune
from benchmarks.quality.settings import Digits
from benchmarks.quality.trained import Case, ResNet, load_case
from rlsprune.app import models
from rlsprune.app.data import Batches

CALIBRATION = 1024
WAYS = ("each layer by itself", "as a whole")


def pruned(case: Case, ratio: float, way: str) -> tuple[nn.Module, rlsprune.PruneEvent, float]:
    """Prunes a copy, and returns it with the event and its seconds."""
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pruner = rlsprune.Pruner(model, optimizer, case.example, ratio=ratio)
    pruner.calibrate(case.images)
    recent = pruner._operation.evidence.recent
    assert recent is not None
    if way == WAYS[0]:
        recent.clear()
    start = time.process_time()
    event = pruner.prune()
    seconds = time.process_time() - start
    pruner.close()
    assert event is not None
    return model, event, seconds


@torch.no_grad()
def in_training_mode(case: Case, model: nn.Module) -> float:
    """Computes the accuracy in % with the statistics of each batch; the network stays as it is."""
    network = copy.deepcopy(model).train()
    return 100 * torch.cat([(network(x).argmax(1) == y).float() for x, y in case.test]).mean().item()


def report(case: Case, ratios: list[float]) -> None:
    """Prints the table."""
    forward = case.forward_seconds()
    print("| ξ | refitted | accuracy % | in training mode | parameters | FLOPs | forward passes |")
    print("|---|---|---:|---:|---:|---:|---:|")
    print(f"| – | the network | {case.accuracy(case.model):.2f} | {in_training_mode(case, case.model):.2f} | 1 | 1 | |")
    for ratio in ratios:
        for way in WAYS:
            model, event, seconds = pruned(case, ratio, way)
            shares = event.params_after / event.params_before, event.flops_after / event.flops_before
            cells = [
                *(f"{ratio:g}", way, f"{case.accuracy(model):.2f}", f"{in_training_mode(case, model):.2f}"),
                *(f"{share:.3f}" for share in shares),
                f"{seconds / forward:.1f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def train(images: int, epochs: int, seed: int, way: str) -> str:
    """Trains and formats a row of the table: events, final accuracy, and parameters left."""
    digits = Digits(images)
    torch.manual_seed(seed)
    model = models.ResNet(8)
    model[0] = nn.Conv2d(1, 16, 3, padding=1, bias=False)  # the digits are grey
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, digits.test.images[:1].float())
    batches = Batches(digits.train.images, digits.train.labels, 64, seed=seed)
    whole, events = sum(p.numel() for p in model.parameters()), []
    for epoch in range(epochs):
        loss = digits.train_epoch(batches, model, optimizer, cross_entropy)
        before = digits.accuracy(model)
        recent = pruner._operation.evidence.recent
        assert recent is not None
        if way == WAYS[0]:
            recent.clear()
        if epoch == epochs - 2:
            pruner.stop()  # the last epochs are for recovery
        if pruner.step(loss) is not None:
            events.append(f"{before:.1f} → {digits.accuracy(model):.1f}")
    share = sum(p.numel() for p in model.parameters()) / whole
    return f"| {seed} | {way} | {', '.join(events)} | {digits.accuracy(model):.1f} | {share:.3f} |"


def quick_case() -> Case:
    """Makes an untrained network on noise, to show that the benchmark runs."""
    torch.manual_seed(0)
    images: list[Tensor] = [torch.randn(16, 3, 16, 16) for _ in range(4)]
    labels = [torch.zeros(16, dtype=torch.long) for _ in images]
    return Case(ResNet(1).eval(), images, labels, list(zip(images, labels, strict=True)))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?", help="safetensors of a ResNet for CIFAR-10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--ratios", default="0.1,0.2,0.3,0.4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", action="store_true", help="train a ResNet-8 on the digits from scratch")
    parser.add_argument("--images", type=int, default=4000, help="number of training images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.training:
        print("| seed | refitted | accuracy % at events | in the end | parameters |\n|---|---|---|---:|---:|")
        for seed in map(int, options.seeds.split(",")):
            for way in WAYS:
                print(train(options.images, options.epochs, seed, way), flush=True)
        return
    if options.quick:
        report(quick_case(), [0.3])
        return
    if options.weights is None:
        parser.error("give the file of the weights, or --quick")
    case = load_case(options.weights, options.data_dir, options.seed, options.test_images)
    report(
        Case(case.model, case.images[: CALIBRATION // len(case.images[0])], case.labels, case.test),
        [float(ratio) for ratio in options.ratios.split(",")],
    )


if __name__ == "__main__":
    main()
