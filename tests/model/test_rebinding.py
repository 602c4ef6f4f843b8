"""A copy of a network never runs the layers of the original, whatever functions it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from rlsprune.model.calls import bare_copy


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def closure(model: nn.Module) -> None:
    before = model.forward
    model.forward = lambda x: before(x) + 1


def script(model: nn.Module) -> None:
    known: dict[str, Any] = {"model": model, "before": model.forward}
    exec("def helper(x): return before(x)\nmodel.forward = lambda x: helper(x) + 1", known)


def nested(model: nn.Module) -> None:
    known: dict[str, Any] = {"model": model, "run": lambda function, x: function(x)}
    exec("model.forward = lambda x: run(lambda y: sum([model[3](model[0](y)) for _ in range(2)]), x)", known)


def default(model: nn.Module) -> None:
    def forward(x: Tensor, first: nn.Module = model[0], *, last: nn.Module = model[3]) -> Tensor:
        return last(first(x).relu())

    model.forward = forward


def part(model: nn.Module) -> None:
    def forward(layers: list[nn.Module], x: Tensor) -> Tensor:
        return layers[1](layers[0](x))

    model.forward = functools.partial(forward, [model[0], model[3]])


def decorated(model: nn.Module) -> None:
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


def weights(model: nn.Module) -> None:
    first, last = model[0].weight, model[3].weight
    model.forward = lambda x: (x @ first.T) @ last.T


def child(model: nn.Module) -> None:
    before = model[0].forward
    model[0].forward = lambda x: 2 * before(x)


def hook(model: nn.Module) -> None:
    last = model[3]
    model[2].register_forward_hook(lambda module, args, output: output + last.weight.sum())


def recursive(model: nn.Module) -> None:
    def forward(x: Tensor, depth: int = 2) -> Tensor:
        return forward(x, depth - 1) if depth else model[3](model[0](x))

    model.forward = forward


PATCHES: list[Callable[[nn.Module], None]] = [
    closure,
    script,
    nested,
    default,
    part,
    decorated,
    weights,
    child,
    hook,
    recursive,
]


@pytest.mark.parametrize("patch", PATCHES)
def test_a_copy_runs_its_own_layers(patch: Callable[[nn.Module], None]) -> None:
    model, inputs = network().eval(), torch.randn(5, 4)
    patch(model)
    copied, before = bare_copy(model), model(inputs)
    torch.testing.assert_close(copied(inputs), before, rtol=0, atol=0)
    with torch.no_grad():
        model[0].weight.zero_()
        model[3].weight.zero_()
    torch.testing.assert_close(copied(inputs), before, rtol=0, atol=0)
    assert not torch.equal(model(inputs), before)


def test_a_name_of_an_attribute_is_no_use_of_a_global() -> None:
    known: dict[str, Any] = {"weight": network()[0], "calls": 0}
    exec("def hook(module, args, output):\n    global calls\n    calls += 1\n    module.weight.sum()", known)
    model = nn.Sequential(known["weight"])
    model[0].register_forward_hook(known["hook"])
    bare_copy(model)(torch.rand(2, 4))
    assert known["calls"] == 1


def test_functions_that_hold_nothing_of_the_network_stay_the_same() -> None:
    def scaled(x: Tensor) -> Tensor:
        return torch.relu(x) * factor

    factor = 2.0
    model = network()
    model.act, model.table = scaled, {"relu": nn.functional.relu, "itself": [scaled]}
    copied = bare_copy(model)
    assert copied.act is scaled
    assert copied.table["relu"] is nn.functional.relu
    assert copied.table["itself"] == [scaled]


@pytest.mark.parametrize("patch", [closure, script, decorated, child])
def test_networks_with_a_replaced_forward_are_refitted_as_others_are(patch: Callable[[nn.Module], None]) -> None:
    inputs = torch.randn(512, 4)
    agreement = []
    for patched in (False, True):
        model = network().eval()
        if patched or patch is child:  # which changes what the network computes
            patch(model)
        before = model(inputs).argmax(1)
        small = rlsprune.shrink(model, list(inputs.split(64)), target={"params": 0.7}, ignore=["input"])
        agreement.append((model(inputs).argmax(1) == before).float().mean().item())
        assert small.chosen.score == pytest.approx(100 * agreement[-1], abs=3)
    assert agreement[1] > agreement[0] - 0.03


def test_an_event_of_a_network_with_a_replaced_forward_is_refitted_as_a_whole() -> None:
    model, inputs = network(), torch.randn(64, 4)
    closure(model)
    pruner = rlsprune.Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), inputs[:1], ratio=0.3, ignore=["input"]
    )
    pruner.calibrate([inputs])
    event = pruner.prune()
    assert event is not None
    assert event.refit == "whole"
