"""Where RLS has a closed form, it lands on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from reference.training import closed_form_ridge, paper_loss


def regress(inputs: Tensor, targets: Tensor, **options: float) -> tuple[nn.Linear, rlsprune.RLS]:
    layer = nn.Linear(inputs.shape[1], targets.shape[1]).to(inputs.dtype)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = rlsprune.RLS(layer, lr=1.0, momentum=0.0, mean_scale=1.0, **options)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        paper_loss(layer(x[None]), y[None]).backward()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("forgetting", [1.0, 0.98])
@pytest.mark.parametrize("p0", [0.5, 100.0])
def test_one_sample_at_a_time_is_weighted_ridge_regression(forgetting: float, p0: float) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(120, 6, dtype=torch.float64)
    targets = inputs @ torch.randn(6, 2, dtype=torch.float64) + 1.5 + 0.1 * torch.randn(120, 2, dtype=torch.float64)
    layer, optimizer = regress(inputs, targets, p0=p0, forgetting=forgetting)
    ridge = closed_form_ridge(inputs, targets, p0=p0, forgetting=forgetting)
    torch.testing.assert_close(layer.weight.data, ridge.weight, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer.bias.data, ridge.bias, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(optimizer.inverse(""), ridge.P, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float64, 1e-10)])
def test_p_is_the_inverse_of_its_own_autocorrelation_after_thousands_of_steps(
    dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20, 3).to(dtype)
    optimizer = rlsprune.RLS(layer, lr=1e-3)
    autocorrelation = torch.eye(21, dtype=torch.float64)
    for _ in range(3000):
        inputs = torch.rand(8, 20, dtype=dtype)
        optimizer.zero_grad()
        layer(inputs).square().mean().backward()
        optimizer.step()
        x = torch.cat([inputs.double().mean(0), torch.ones(1, dtype=torch.float64)])
        autocorrelation += 0.1 * torch.outer(x, x)
    P = torch.linalg.inv(autocorrelation)
    assert (optimizer.inverse("").double() - P).abs().max() < tolerance * P.abs().max()
    assert optimizer.check()[""].healthy
