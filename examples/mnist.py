"""MNIST: a network is trained, and loses nine tenths of its weights on the way.

    python examples/mnist.py --data DIR          # with MNIST's four idx files, plain or gzipped
    python examples/mnist.py --synthetic         # made-up images, in seconds

RESULT
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import rlsprune

BATCH, FALLING, SETTLING = 128, 0.4, 0.4


def build_model() -> nn.Sequential:
    """The paper's fully-connected network for MNIST."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Eq. (15) of the paper."""
    return (outputs - nn.functional.one_hot(labels, 10)).square().sum(1).mean() / 2


def read_mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) and labels (N,) from the idx files: a header of 16 or 8 bytes, then one byte each."""
    arrays = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = next(folder.glob(f"{part}-{kind}-ubyte*"), None)
        if path is None:
            raise SystemExit(f"{folder} has no {part}-{kind}-ubyte: put MNIST's four files there")
        content = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        arrays.append(torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy()))
    return arrays[0].view(-1, 28, 28), arrays[1].long()


def synthetic(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten blurred patterns inside a black margin, with noise."""
    patterns = torch.rand(10, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    clean = nn.functional.pad(nn.functional.interpolate(patterns, 20, mode="bilinear"), (4,) * 4)[:, 0]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (127 * clean[labels] * (1 + noise)).byte(), labels


def pixels(images: Tensor) -> Tensor:
    """As the network takes them: between 0 and 1."""
    return images.float().flatten(1) / 255


def moved(images: Tensor) -> Tensor:
    """Every image moved by at most a pixel in both directions, so that no two epochs see the same."""
    windows = nn.functional.pad(images, (1,) * 4).unfold(1, 28, 1).unfold(2, 28, 1)
    down, right = torch.randint(3, (2, len(images)))
    return windows[torch.arange(len(images)), down, right]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss, and accuracy in %."""
    outputs = model(pixels(images))
    return squared_error(outputs, labels).item(), 100 * (outputs.argmax(1) == labels).float().mean().item()


def train(images: Tensor, labels: Tensor, epochs: int, target: float, seed: int) -> tuple[nn.Module, rlsprune.Pruner]:
    """The small network, and the pruner that made it so."""
    torch.manual_seed(seed)
    model = build_model()
    mixed = torch.randperm(len(images))
    used, held_out = mixed[len(images) // 12 :], mixed[: len(images) // 12]
    count, per_epoch = len(used), -(-len(used) // BATCH)

    # The network that is kept is the mean over about an epoch of steps. Early on it reaches back less far, so that it
    # leaves the initial weights behind.
    average = AveragedModel(
        model, avg_fn=lambda mean, new, taken: mean.lerp(new, max(1 / per_epoch, 3 / (3 + float(taken))))
    )
    # With a small k, and a P that starts anew at a prune, what is left of the network learns as fast as at first.
    optimizer = rlsprune.RLS(model, mean_scale=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (1 - step / (epochs * per_epoch)) / FALLING))
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        torch.zeros(1, 784),
        ratio=0.4,
        warmup_epochs=1,
        inverse="reset",
        tolerance=0.05,
        patience=3,
        target={"params": target},
        on_prune=lambda event: print(event, flush=True),
    )
    pruner.follow(average)  # from now on both networks lose the same channels

    for epoch in range(1, epochs + 1):
        if pruner.done and pruner.recovered:
            used = mixed  # nothing depends on the held-out images any more: train on them too
        model.train()
        for batch in used[torch.randperm(len(used))[:count]].split(BATCH):  # epochs stay equally long
            loss = squared_error(model(pixels(moved(images[batch]))), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        if used is not mixed:
            if epoch > max(2, (1 - SETTLING) * epochs):
                pruner.stop()  # the rest of the epochs is for recovery
            pruner.step(evaluate(average, images[held_out], labels[held_out])[0])
    pruner.finish()
    return average.module, pruner


def main(arguments: list[str] | None = None) -> nn.Module:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="the folder of MNIST's files")
    source.add_argument("--synthetic", action="store_true", help="a few made-up images instead")
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--target", type=float, default=0.1, help="the share of the parameters that stays")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="mnist.safetensors")
    options = parser.parse_args(arguments)
    train_set = synthetic(1500, 1) if options.synthetic else read_mnist(options.data, "train")
    test_set = synthetic(500, 2) if options.synthetic else read_mnist(options.data, "t10k")

    started = time.process_time()
    small, pruner = train(*train_set, options.epochs, options.target, options.seed)
    seconds = time.process_time() - started
    params = [sum(p.numel() for p in network.parameters()) for network in (build_model(), small)]
    print(
        f"{params[0]:,} → {params[1]:,} parameters ({params[1] / params[0]:.1%}), {len(pruner.kept_inputs)} of 784 pixels; "
        f"accuracy {evaluate(small, *test_set)[1]:.2f} %; {seconds:.0f} s of processor time"
    )
    rlsprune.save(small, options.out)  # rlsprune.load(path, into=build_model()) brings it back
    return small


if __name__ == "__main__":
    main()
