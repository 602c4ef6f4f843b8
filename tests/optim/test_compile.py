"""Compiled networks train and are pruned to the same numbers, and none of our hooks breaks their graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import rlsprune
from networks import SHAPES, cnn, fnn, target


def train(call: Any, optimizer: rlsprune.RLS, shape: tuple[int, ...], steps: int = 3) -> float:
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.rand(16, *shape, generator=generator)
        optimizer.zero_grad()
        loss = (call(inputs) - target(inputs)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def run(make: Any, compiler: Any, when: str = "after") -> tuple[nn.Module, rlsprune.RLS, rlsprune.Pruner]:
    """Two prunes, each after three steps, and three more steps."""
    torch.compiler.reset()
    model = make()
    call = torch.compile(model, backend=compiler, fullgraph=True) if compiler and when == "before" else model
    if call is not model:
        call(torch.rand(16, *SHAPES[make]))
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, *SHAPES[make]), criterion="obs", ratio=0.3)
    if compiler and when == "after":
        call = torch.compile(model, backend=compiler, fullgraph=True)
    for _ in range(2):
        train(call, optimizer, SHAPES[make])
        assert pruner.prune() is not None
    train(call, optimizer, SHAPES[make])
    return model, optimizer, pruner


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [fnn, cnn])
def test_compiled_is_eager_in_one_graph_that_is_compiled_once_per_shape(make: Any, when: str) -> None:
    eager, eager_optimizer, eager_pruner = run(make, None)
    counter = CompileCounterWithBackend("aot_eager")
    model, optimizer, pruner = run(make, counter, when)
    # Once at first, once after each prune, and once before there was an optimizer.
    assert counter.frame_count == 3 + (when == "before")
    assert [event.removed for event in pruner.history] == [event.removed for event in eager_pruner.history]
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()), rtol=0, atol=1e-5)
    for name in optimizer._recorders:
        torch.testing.assert_close(optimizer.inverse(name), eager_optimizer.inverse(name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [fnn, cnn])
def test_a_copy_of_model_and_optimizer_is_compiled_like_them(make: Any) -> None:
    model = make()
    optimizer = rlsprune.RLS(model, lr=0.1)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for network, own in ((model, optimizer), (twin, twin_optimizer)):
        torch.compiler.reset()
        train(torch.compile(network, backend="aot_eager", fullgraph=True), own, SHAPES[make])
    torch.testing.assert_close(twin_optimizer.inverse("0"), optimizer.inverse("0"), rtol=0, atol=0)


def test_a_scaler_in_half_precision_trains_as_without() -> None:
    results = []
    for scaled in (False, True):
        model = fnn()
        optimizer = rlsprune.RLS(model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            inputs = torch.rand(16, 20, generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                outputs = model(inputs)
            loss = (outputs.float() - target(inputs)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((model, optimizer))
    (plain, plain_optimizer), (half, half_optimizer) = results
    assert half_optimizer.inverse("2").dtype == torch.float32
    torch.testing.assert_close(dict(half.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=5e-3)
    torch.testing.assert_close(half_optimizer.inverse("2"), plain_optimizer.inverse("2"), rtol=0, atol=5e-3)


def test_a_step_that_the_scaler_skips_leaves_everything() -> None:
    model = fnn()
    optimizer = rlsprune.RLS(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.full((4, 20), 1e30)).square().sum() * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.memory_usage()["inverse"]
