"""A residual network with batch norm, pruned while it trains.

python examples/resnet.py --data cifar-10-batches-bin   # ResNet-20; hours on one core
python examples/resnet.py                               # a small network on made-up images, in seconds
python examples/resnet.py --optimizer rls               # any optimizer will do
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim import AdamW, Optimizer, lr_scheduler

import rlsprune


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output. The pruner finds by itself that channels of a sum are removed together."""
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


def build_model(blocks: int) -> nn.Sequential:
    """Builds three stages of `blocks` blocks; 3 make a ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        layers += [Block(inputs, outputs, outputs // inputs), *(Block(outputs, outputs, 1) for _ in range(blocks - 1))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def read(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Reads CIFAR-10's binary files: one byte of label and 3,072 bytes of pixels per image."""
    records = torch.from_numpy(np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, 3073))
    return records[:, 1:].view(-1, 3, 32, 32) / 255, records[:, 0].long()


def made_up(count: int) -> tuple[Tensor, Tensor]:
    """Makes images of ten patterns of 16×16 pixels, with noise, and their labels."""
    patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 2)
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(10, (count,), generator=generator)
    return patterns.repeat_interleave(4, 3)[labels] + torch.rand(count, 3, 16, 16, generator=generator), labels


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Computes loss, and accuracy in %."""
    model.eval()
    outputs = torch.cat([model(part) for part in images.split(500)])
    return cross_entropy(outputs, labels).item(), 100 * (outputs.argmax(1) == labels).float().mean().item()


def train(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Trains the model, and prunes it to 40 % of its FLOPs."""
    mixed = torch.randperm(len(images))
    held_out, used = mixed[: len(images) // 10], mixed[len(images) // 10 :]
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, 2 * (1 - epoch / epochs)))
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        images[:2],
        ratio=0.25,
        warmup_epochs=epochs // 8,
        tolerance=0.1,
        target={"flops": 0.4},
        # Each event prunes the layers where this rises least, so layers are not pruned evenly. A few images will do.
        held_out_loss=lambda: evaluate(model, images[held_out[:500]], labels[held_out[:500]])[0],
    )
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in used[torch.randperm(len(used))].split(64):
            inputs = images[batch].flip(-1) if torch.rand(()) < 0.5 else images[batch]  # half of the batches mirrored
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
        if epoch > 0.7 * epochs:
            pruner.stop()  # the rest is for recovery, at a falling rate
        pruner.step(evaluate(model, images[held_out], labels[held_out])[0])
        print(pruner, flush=True)
    pruner.finish()


def main(arguments: list[str] | None = None) -> nn.Module:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-10's binary files; default: made-up images")
    parser.add_argument("--optimizer", choices=("adamw", "rls"), default="adamw")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--out", default="resnet.safetensors")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images, labels = read(sorted(options.data.glob("data_batch_*"))) if options.data else made_up(1000)
    test_set = read([options.data / "test_batch.bin"]) if options.data else made_up(500)
    model = build_model(blocks=3 if options.data else 1)
    before = rlsprune.profile(model, images[:64])
    # With batch norm and cross-entropy RLS needs less than the paper's rate of 1.
    optimizer = rlsprune.RLS(model, lr=0.1) if options.optimizer == "rls" else AdamW(model.parameters(), lr=2e-3)
    train(model, optimizer, images, labels, options.epochs)
    print(rlsprune.profile(model, images[:64], before))
    print(f"test accuracy {evaluate(model, *test_set)[1]:.2f} %")
    rlsprune.save(model, options.out)  # rlsprune.load(path, into=build_model(…)) loads it
    return model


if __name__ == "__main__":
    main()
