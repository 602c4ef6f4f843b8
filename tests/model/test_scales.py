"""Columns of very different scales are told once, and others never."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import rlsprune


def train(inputs: Tensor, steps: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = rlsprune.RLS(model, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def test_wild_scales_are_told_once() -> None:
    inputs = torch.rand(32, 4) * torch.tensor([0.01, 1.0, 1.0, 1000.0])
    with pytest.warns(UserWarning, match=r"Linear\(in_features=4.*columns 3 and 0.*standardise") as told:
        train(inputs)
    assert len(told) == 1, "once, and not for the layer that reads the other's outputs"


@pytest.mark.parametrize(
    "inputs",
    [
        torch.rand(32, 4) * 1000,  # all large
        torch.rand(32, 4) * torch.tensor([1e-4, 1.0, 1.0, 1.0]),  # a rare pixel
        torch.cat([torch.zeros(32, 2), torch.rand(32, 2)], 1),  # constant columns
        (torch.rand(32, 4) * torch.tensor([1e-2, 1.0, 1e3, 1e5]) - 5).div(1e6),  # small, if of different scales
    ],
)
def test_other_scales_are_not(inputs: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(inputs, steps=1)
