"""The whole pruner on every architecture of the zoo: each event is sound, and the network trains on after it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from rlsprune.model.counts import count
from rlsprune.optim.layers import is_layer
from zoo import ZOO


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    specimen = ZOO[name]
    return specimen.make(), torch.rand(specimen.shape)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "rls":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # attention's projection goes to the fallback group
            return rlsprune.RLS(model, lr=0.05, fallback_lr=0.05)
    return {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
    }[name]()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.rand(8, *x.shape[1:], generator=generator)
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer_name", ["rls", "sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ZOO)
def test_two_compensated_events_and_training_in_between(name: str, optimizer_name: str) -> None:
    model, x = make(name)
    optimizer = optimizer_of(optimizer_name, model)
    pruner = rlsprune.Pruner(model, optimizer, x, ratio=0.34, criterion="obs", warmup_epochs=0, patience=None)
    for loss in (1.0, 0.5):
        train(model, optimizer, x, 3)
        event = pruner.step(loss)
        assert event is not None
        assert event.params_after < event.params_before
        assert event.flops_after < event.flops_before
        assert (event.params_after, event.flops_after) == count(model, x)
        before = copy.deepcopy(model)
        train(model, optimizer, x, 1)
        for (key, p), old in zip(model.named_parameters(), before.parameters(), strict=True):
            if p.grad is not None and p.grad.abs().max() > 1e-6:
                assert not torch.equal(p, old), key
        if isinstance(optimizer, rlsprune.RLS):
            assert all(health.healthy for health in optimizer.check().values())
            # BEiT uses the weight of this layer without calling it.
            assert_p_fits(model, optimizer, besides="block.attention.qkv" if name == "beit" else None)


def assert_p_fits(model: nn.Module, optimizer: rlsprune.RLS, besides: str | None = None) -> None:
    for group in optimizer.param_groups:
        if group["preconditioned"] and group["name"] != besides:
            layer = model.get_submodule(group["name"])
            assert is_layer(layer)
            size = layer.weight[0].numel() + (layer.bias is not None)
            P = optimizer.inverse(group["name"])
            groups = getattr(layer, "groups", 1)
            assert P.shape == ((size, size) if groups == 1 else (groups, size, size)), group["name"]


@pytest.mark.parametrize("name", ["fnn", "vgg", "resnext", "densenet", "inception", "conv1d"])
@pytest.mark.parametrize("criterion", ["rls", "obs", "l1"])
def test_training_statistics_prune_too(name: str, criterion: str) -> None:
    model, x = make(name)
    optimizer = optimizer_of("rls", model)
    options: dict[str, Any] = {"statistics": "training", "criterion": criterion, "ratio": 0.5, "patience": None}
    pruner = rlsprune.Pruner(model, optimizer, x, **options)
    train(model, optimizer, x, 3)
    event = pruner.prune()
    assert event.params_after < event.params_before
    train(model, optimizer, x, 2)
    assert_p_fits(model, optimizer)


@pytest.mark.parametrize("name", ["vgg", "resnext", "densenet", "inception", "mobilenet", "conv1d", "conv3d", "unet"])
def test_compensation_lowers_the_error_of_the_layers_that_read_what_went(name: str) -> None:
    """Measured where it is promised: at the output of the first consumer, on the inputs it was refitted on."""
    errors = []
    for compensate in (False, True):
        model, x = make(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batch = torch.rand(64, *x.shape[1:])
        pruner = rlsprune.Pruner(
            model, optimizer, x, ratio={next(iter(ZOO[name].groups)): 0.4}, criterion="l1", compensate=compensate
        )
        consumer = next(member for member in pruner.groups[0].consumers if is_layer(member.module)).module
        model.eval()
        outputs: list[torch.Tensor] = []
        consumer.register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output.detach()))
        model(batch)
        if compensate:
            pruner.calibrate([batch])
        pruner.prune()
        outputs[1:] = []
        model(batch)
        errors.append((outputs[1] - outputs[0]).square().mean().item())
    assert errors[1] < 0.95 * errors[0]
