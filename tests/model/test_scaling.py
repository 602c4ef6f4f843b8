"""Scaling moved into a layer gives what the scaled columns gave, and can be taken out again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlsprune.model.scaling import Scaling
from rlsprune.model.selector import select_inputs


def table() -> Tensor:
    rows = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows * torch.tensor([1e-3, 1.0, 50.0, 1e6, 0.0]) + torch.tensor([0.0, 3.0, -20.0, 5e7, 7.0])


@pytest.mark.parametrize("centred", [True, False])
def test_columns_get_mean_0_and_deviation_1(centred: bool) -> None:
    rows = table()
    scaled = Scaling.of(rows, centred=centred).scaled(rows)
    torch.testing.assert_close(scaled.square().mean(0)[:4], torch.ones(4, dtype=torch.float64))
    if centred:
        torch.testing.assert_close(scaled.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9)
        assert scaled[:, 4].abs().max() == 0, "a constant column is not divided by its rounding"


@pytest.mark.parametrize("kept", [None, [0, 2, 3]])
@pytest.mark.parametrize("bias", [True, False])
def test_a_reader_takes_the_scaling_over_and_gives_it_back(bias: bool, kept: list[int] | None) -> None:
    rows, layer = table(), nn.Linear(5, 3, bias=bias).double()
    if kept is not None:
        layer.weight = nn.Parameter(layer.weight[:, kept].detach())
        select_inputs(layer, torch.tensor(kept))
    scaling = Scaling.of(rows, centred=bias)
    before, weight = layer(scaling.scaled(rows)), layer.weight.detach().clone()
    scaling.add_to_reader(layer)
    torch.testing.assert_close(layer(rows), before)
    scaling.take_from_reader(layer)
    torch.testing.assert_close(layer.weight, weight, check_dtype=False)


def test_a_writer_takes_the_scaling_over_and_gives_it_back() -> None:
    targets, inputs, layer = table(), torch.randn(7, 4).double(), nn.Linear(4, 5).double()
    scaling = Scaling.of(targets)
    before = layer(inputs)
    scaling.add_to_writer(layer)
    torch.testing.assert_close(layer(inputs), scaling.unscaled(before))
    scaling.take_from_writer(layer)
    torch.testing.assert_close(layer(inputs), before)
