"""Small networks and their training by RLS, for all estimators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.model.arguments import check_argument, is_count
from rlsprune.optim.rls import RLS
from rlsprune.prune.features import RowLoss

__all__ = [
    "FloatArray",
    "check_training",
    "class_numbers",
    "cross_entropy",
    "feature_count",
    "make_network",
    "seeded",
    "squared_error",
    "train_epochs",
]

FloatArray = npt.NDArray[np.float64]

_LEAST_BATCH, _MOST_BATCHES = 32, 20


def make_network(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Makes a fully-connected network with ReLU."""
    widths = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def train_epochs(
    networks: Sequence[nn.Module],
    optimizer: RLS,
    rows: Sequence[tuple[Tensor, Tensor]],
    loss: RowLoss,
    epochs: int,
    batch_size: int | None,
) -> Iterator[int]:
    """Trains networks side by side, each on its own rows, at a rate that falls to zero; yields each epoch's number."""
    rates = [group["lr"] for group in optimizer.param_groups]
    count = min(len(inputs) for inputs, _ in rows)
    size = batch_size or max(_LEAST_BATCH, count // _MOST_BATCHES)
    batches = math.ceil(count / size)
    for epoch in range(1, epochs + 1):
        orders = [torch.randperm(len(inputs)) for inputs, _ in rows]
        for network in networks:
            network.train()
        for number in range(batches):
            left = 1 - ((epoch - 1) * batches + number) / (epochs * batches)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * left
            total = torch.zeros(())
            for network, order, (inputs, targets) in zip(networks, orders, rows, strict=True):
                batch = order[number * size : min((number + 1) * size, count)]
                total = total + loss(network(inputs[batch]), targets[batch]).mean()
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of each row, for classes."""
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of each row, for numbers."""
    return (outputs - targets).square().mean(-1)


@contextmanager
def seeded(random_state: int | np.random.RandomState | None) -> Iterator[int]:
    """Seeds torch inside, restores the caller's random state at the end, and yields the seed."""
    seed = int(check_random_state(random_state).randint(2**31 - 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield seed


def class_numbers(y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the classes, and the number of each row's class.

    Raises:
        ValueError: There are fewer than two classes.
    """
    check_classification_targets(y)
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y has one class only, {classes[0]}: give rows of two classes or more")
    return classes, numbers


def feature_count(name: str, asked: Any, columns: int, automatic: str | None) -> int | None:
    """Returns the number of columns that an argument (a count or a share) asks for; None if it leaves that open."""
    if asked == automatic:
        return None
    share = isinstance(asked, float) and 0 < asked <= 1
    free = "None" if automatic is None else f'"{automatic}"'
    check_argument(name, asked, share or is_count(asked), f"{free}, a count, or a share in (0, 1]")
    return max(1, round(asked * columns)) if share else min(int(asked), columns)


def check_training(hidden: Sequence[int], epochs: int, batch_size: int | None) -> None:
    """Raises ValueError unless sizes and counts are positive whole numbers."""
    sizes = isinstance(hidden, Sequence | np.ndarray) and all(map(is_count, hidden))
    check_argument("hidden_layer_sizes", hidden, sizes, "a size for each hidden layer, such as (32,)")
    check_argument("epochs", epochs, is_count(epochs), "at least 1")
    check_argument("batch_size", batch_size, batch_size is None or is_count(batch_size), "None or at least 1")
