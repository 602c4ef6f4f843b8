"""Networks in training, for the pruner's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rlsprune


def fnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 12, 3), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(12 * 4, 15), nn.ReLU(), nn.Linear(15, 3))


SHAPES = {fnn: (20,), cnn: (3, 8, 8)}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], steps: int = 12, seed: int = 0
) -> float:
    """A few steps towards a fixed function of the input; the last loss."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.rand(32, *shape, generator=generator).to(dtype)
        optimizer.zero_grad()
        loss = (model(inputs) - target(inputs)).square().sum() / 64
        loss.backward()
        optimizer.step()
    return loss.item()


def target(inputs: Tensor) -> Tensor:
    flat = inputs.flatten(1)
    return torch.stack([flat.mean(1), flat[:, 3] - flat[:, 7], (flat[:, 1] * flat[:, 2])], 1)


def trained(make: Callable[[], nn.Sequential], **options: Any) -> tuple[nn.Sequential, rlsprune.RLS]:
    """A float64 network after a few steps of RLS."""
    model = make().double()
    optimizer = rlsprune.RLS(model, lr=0.3, **options)
    train(model, optimizer, SHAPES[make])
    return model, optimizer
