"""Both ways of computing P∇W give the same step, whatever the user does to the gradient in between."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rlsprune
from rlsprune.optim import layer_step

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
@pytest.mark.parametrize("batches", [1, 3])
def test_edited_gradients_step_as_the_direct_way(edit: Edit, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)).double()
    direct_model = copy.deepcopy(model)
    optimizers = [rlsprune.RLS(m, lr=0.01) for m in (model, direct_model)]
    ways: list[bool] = []
    original = layer_step.match_gradient

    def watch(*args: object) -> object:
        result = original(*args)
        ways.append(result[0] is not None)
        return result

    for _ in range(4):
        data = [torch.rand(4, 40).double() for _ in range(batches)]
        torch.manual_seed(1)
        for m, optimizer in zip((model, direct_model), optimizers, strict=True):
            with monkeypatch.context() as patch:
                if m is direct_model:
                    patch.setattr("rlsprune.optim.recorder.Recorder.batch", lambda self: None)
                else:
                    patch.setattr(layer_step, "match_gradient", watch)
                optimizer.zero_grad()
                for inputs in data:
                    m(inputs).square().sum().backward()
                torch.manual_seed(2)
                edit(m)
                optimizer.step()
    for p, q in zip(model.parameters(), direct_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(optimizers[0].inverse("0"), optimizers[1].inverse("0"))
    # A common factor keeps the cheap way; the first layer must leave it for every other edit.
    assert ways[0::2] == [edit in (leave, scale_through_data, clip)] * 4


def test_the_cheap_way_is_taken_by_cost() -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 3))
    optimizer = rlsprune.RLS(model)
    model(torch.rand(20, 40)).sum().backward()
    assert optimizer._recorders["0"].batch() is not None  # 20·(40 + 60) < 40·60
    assert optimizer._recorders["1"].batch() is None  # 20·(60 + 3) > 60·3
    model(torch.rand(20, 40)).sum().backward()
    assert optimizer._recorders["0"].batch() is None  # 40 rows by now


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
