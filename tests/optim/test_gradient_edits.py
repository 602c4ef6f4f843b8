"""The step takes the gradient as it is, whatever the user has done to it since the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rlsprune

Edit = Callable[[nn.Module], None]


def scale_through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.mul_(1 / 1024)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def edit_through_numpy(model: nn.Module) -> None:
    model[0].weight.grad.numpy()[2, 3] += 0.5


def mask_rows(model: nn.Module) -> None:
    model[0].weight.grad[3] = 0


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def edit_bias(model: nn.Module) -> None:
    model[0].bias.grad += 0.1


def drop_bias(model: nn.Module) -> None:
    model[0].bias.grad = None


def leave(model: nn.Module) -> None:
    pass


EDITS = [leave, scale_through_data, clip, clip_values, edit_through_numpy, mask_rows, replace, edit_bias, drop_bias]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("rank", [None, 4])
def test_an_edited_gradient_is_what_is_preconditioned(edit: Edit, rank: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)).double()
    optimizer = rlsprune.RLS(model, lr=0.01, momentum=0.0, rank=rank)
    for _ in range(9):
        optimizer.zero_grad()
        inputs = torch.rand(4, 40).double()
        model(inputs).square().sum().backward()
        edit(model)
        layer = model[0]
        before = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()
        bias = torch.zeros(60, 1).double() if layer.bias.grad is None else layer.bias.grad[:, None]
        gradient = torch.cat([layer.weight.grad, bias], dim=1)
        P = optimizer.inverse("0").clone() if optimizer.state else torch.eye(41).double()
        optimizer.step()
        x = nn.functional.pad(inputs.mean(0), (0, 1), value=1.0)
        moved = -0.01 / (1 + 0.1 * x @ P @ x) * gradient @ P
        if layer.bias.grad is None:
            moved[:, -1] = 0
        after = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()
        torch.testing.assert_close(after - before, moved, rtol=1e-7, atol=1e-12)


def test_grad_scaler_unscaling_is_seen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 2))
    scaled = copy.deepcopy(model)
    inputs = torch.rand(8, 40)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for m in (model, scaled):
        optimizer = rlsprune.RLS(m, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = m(inputs).square().mean()
            if m is scaled:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    for p, q in zip(model.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_step_the_scaler_skips_leaves_no_trace() -> None:
    model = nn.Linear(4, 2)
    optimizer = rlsprune.RLS(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.full((3, 4), 1e5)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), before)
    model(torch.rand(3, 4)).sum().backward()
    assert optimizer._recorders[""].mean.max() <= 1
