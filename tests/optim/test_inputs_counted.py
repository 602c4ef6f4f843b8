"""Which forwards count: exactly those whose gradient reached the layer's parameters since the last step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rlsprune


def mean_of(optimizer: rlsprune.RLS, name: str = "") -> torch.Tensor | None:
    return optimizer._recorders[name].mean


def with_one(mean: torch.Tensor) -> torch.Tensor:
    return torch.cat([mean, torch.ones(1)])[None]


def test_accumulation_averages_by_rows() -> None:
    layer = nn.Linear(5, 2)
    optimizer = rlsprune.RLS(layer)
    batches = [torch.rand(3, 5), torch.rand(7, 5), torch.rand(2, 4, 5)]
    for batch in batches:
        layer(batch).sum().backward()
    torch.testing.assert_close(mean_of(optimizer), with_one(torch.cat([b.reshape(-1, 5) for b in batches]).mean(0)))


def test_a_layer_called_several_times_has_the_rows_of_all_calls() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    optimizer = rlsprune.RLS(conv)
    image = torch.rand(4, 2, 5, 5)
    first = conv(image)
    conv(first).sum().backward()
    rows = [nn.functional.unfold(x, 3, padding=1).mT.reshape(-1, 18) for x in (image, first.detach())]
    torch.testing.assert_close(mean_of(optimizer), with_one(torch.cat(rows).mean(0)))


def test_forwards_without_their_gradient_do_not_count() -> None:
    layer = nn.Linear(5, 2)
    optimizer = rlsprune.RLS(layer)
    with torch.no_grad():
        layer(torch.full((3, 5), 9.0))
    layer(torch.full((3, 5), 9.0))  # no backward
    adversarial = torch.full((3, 5), 9.0, requires_grad=True)
    torch.autograd.grad(layer(adversarial).sum(), adversarial)
    layer.eval()
    layer(torch.full((3, 5), 9.0))
    layer.train()
    assert mean_of(optimizer) is None
    batch = torch.rand(4, 5)
    layer(batch).sum().backward()
    torch.testing.assert_close(mean_of(optimizer), with_one(batch.mean(0)))


@pytest.mark.parametrize("drop", ["optimizer", "model", "by hand"])
def test_a_batch_whose_gradient_was_dropped_does_not_count(drop: str) -> None:
    layer = nn.Linear(5, 2)
    optimizer = rlsprune.RLS(layer)
    layer(torch.full((3, 5), 9.0)).sum().backward()
    if drop == "by hand":
        layer.weight.grad = layer.bias.grad = None
    else:
        (optimizer if drop == "optimizer" else layer).zero_grad()
    batch = torch.rand(4, 5)
    layer(batch).sum().backward()
    torch.testing.assert_close(mean_of(optimizer), with_one(batch.mean(0)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    checkpointed = copy.deepcopy(model)
    optimizers = [rlsprune.RLS(model), rlsprune.RLS(checkpointed)]
    for _ in range(5):
        inputs = torch.rand(4, 30).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs).square().sum().backward()
        hidden = checkpoint(checkpointed[:4], inputs.clone().requires_grad_(), use_reentrant=reentrant)
        checkpointed[4](hidden).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(optimizers[0].inverse("2"), optimizers[1].inverse("2"))


def test_in_place_activations_and_channels_last_change_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    in_place = copy.deepcopy(model)
    in_place[1].inplace = in_place[3].inplace = True
    last = copy.deepcopy(in_place).to(memory_format=torch.channels_last)
    models = [model, in_place, last]
    optimizers = [rlsprune.RLS(m, lr=0.5) for m in models]
    for _ in range(5):
        images = torch.rand(8, 3, 8, 8)
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            m(images.contiguous(memory_format=torch.channels_last) if m is last else images).square().mean().backward()
            optimizer.step()
    for other in (in_place, last):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_live_loss_does_not_keep_activations() -> None:
    def users(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    model = nn.Linear(30, 40)
    optimizer = rlsprune.RLS(model)
    inputs = torch.rand(4, 30)
    before = users(inputs)
    loss = model(inputs).sum()
    loss.backward()
    assert users(inputs) == before
    optimizer.step()
    assert loss.requires_grad


def test_keyword_input_is_seen() -> None:
    layer = nn.Linear(3, 2)
    optimizer = rlsprune.RLS(layer)
    layer(input=torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(mean_of(optimizer), torch.ones(1, 4))


def test_gradients_of_the_parameters_themselves_do_not_count() -> None:
    layer = nn.Linear(3, 2)
    optimizer = rlsprune.RLS(layer)
    grads = torch.autograd.grad(layer(torch.rand(4, 3)).sum(), list(layer.parameters()))
    assert len(grads) == 2
    assert mean_of(optimizer) is None


def test_a_batch_without_rows_moves_nothing() -> None:
    layer = nn.Linear(3, 2)
    optimizer = rlsprune.RLS(layer)
    layer(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy((layer.state_dict(), optimizer.inverse("")))
    optimizer.zero_grad()
    layer(torch.rand(0, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close((layer.state_dict(), optimizer.inverse("")), before, rtol=0, atol=0)


def test_exporting_a_model_in_training_does_not_disturb_it() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
    optimizer = rlsprune.RLS(model, lr=0.1)
    torch.export.export(model, (torch.rand(2, 2, 6, 6),))
    model(torch.rand(2, 2, 6, 6)).sum().backward()
    optimizer.step()
    assert type(optimizer.inverse("0")) is torch.Tensor
