"""The rivals by name, small networks for them, and a few steps of training as a run does it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, RandomChoice, SoftPruning, WeightLevel
from rlsprune.app.run.method import Method

Make = Callable[[nn.Module, Optimizer, Tensor], Method]

STRUCTURED: dict[str, Make] = {
    "l1-norm": lambda m, o, x: L1Norm(m, o, x, ratio=0.5, prune_epoch=2),
    "net-slimming": lambda m, o, x: NetSlimming(m, o, x, ratio=0.5, prune_epoch=2),
    "depgraph": lambda m, o, x: DepGraph(m, o, x, ratio=0.5, prune_epoch=2),
    "depgraph-network": lambda m, o, x: DepGraph(m, o, x, ratio=0.5, prune_epoch=2, scope="network"),
    "random": lambda m, o, x: RandomChoice(m, o, x, ratio=0.5, prune_epoch=2, seed=0),
}
ZEROING: dict[str, Make] = {
    "soft-pruning": lambda m, o, x: SoftPruning(m, x),
    "weight-level": lambda m, o, x: WeightLevel(m, x, ratio=0.5, prune_epoch=2),
}
RIVALS = STRUCTURED | ZEROING


SHAPE = (2, 3, 8, 8)


def small(seed: int = 0) -> nn.Sequential:
    """Two convolutions and a fully-connected layer, each with a batch norm, and the outputs."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1, 1)
    return model


def inputs() -> Tensor:
    """An example of its input."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def sgd(model: nn.Module) -> SGD:
    """The paper's optimizer for the rivals."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def epoch(model: nn.Module, optimizer: Optimizer, method: Method, shape: tuple[int, ...], seed: int) -> float:
    """Three batches of random numbers, as a run drives a method."""
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(3):
        x = torch.randn(16, *shape[1:], generator=generator)
        out = model(x)
        loss = functional.mse_loss(out, torch.randn(out.shape, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        method.after_backward()
        optimizer.step()
        method.after_step()
    return loss.item()
