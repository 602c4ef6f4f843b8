"""All or nothing: after ``restore`` nothing tells that anything happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.graph import find_groups, plan_cuts
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts
from zoo import ZOO, remove, some_units


def frozen(value: Any) -> Any:
    """A deep copy in which tensors compare by value."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.tolist())
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return value


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return (
        frozen(dict(model.state_dict())),
        [(id(parameter), parameter.requires_grad) for parameter in model.parameters()],
        [str(module) for module in model.modules()],
        {names[parameter]: frozen(state) for parameter, state in optimizer.state.items()},
    )


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["vgg-bn", "mobilenet", "group-norm", "resnext", "unet", "prelu"])
@pytest.mark.parametrize("copy", [False, True])
def test_restore_undoes_surgery(name: str, copy: bool) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    graph = find_groups(model, specimen.inputs())
    step(model, optimizer, specimen.inputs())
    first = next(model.parameters())
    optimizer.state[first]["inverse"] = [torch.eye(3), torch.ones(2)]
    optimizer.state[first]["note"] = {"kind": "exact", "P": torch.eye(2)}
    before, gradients = everything(model, optimizer), [p.grad.clone() for p in model.parameters()]
    snapshot = Snapshot(model, optimizer, copy=copy)
    groups = graph.groups
    remove(model, graph, some_units(graph), optimizer)
    optimizer.state[first]["inverse"][0] = torch.zeros(1)
    optimizer.state[first]["note"]["P"] = None
    assert everything(model, optimizer) != before
    snapshot.restore()
    graph.groups = groups
    assert everything(model, optimizer) == before
    if not copy:
        assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), gradients, strict=True))
    step(model, optimizer, specimen.inputs())
    remove(model, graph, some_units(graph), optimizer)


def test_copy_undoes_training_too_and_more_than_once() -> None:
    specimen = ZOO["vgg-bn"]
    model = specimen.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step(model, optimizer, specimen.inputs())
    before = everything(model, optimizer)
    snapshot = Snapshot(model, optimizer, copy=True)
    for seed in range(2):
        graph = find_groups(model, specimen.inputs())
        step(model, optimizer, specimen.inputs())
        remove(model, graph, some_units(graph, seed), optimizer)
        step(model, optimizer, specimen.inputs())
        snapshot.restore()
        assert everything(model, optimizer) == before


def test_state_that_appeared_since_goes() -> None:
    specimen = ZOO["fnn"]
    model = specimen.model()
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = Snapshot(model, optimizer, copy=True)
    step(model, optimizer, specimen.inputs())
    snapshot.restore()
    assert not optimizer.state


def test_an_event_that_fails_half_way_leaves_no_trace() -> None:
    specimen = ZOO["vgg"]
    model = specimen.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step(model, optimizer, specimen.inputs())
    before = everything(model, optimizer)
    graph = find_groups(model, specimen.inputs())
    stale = plan_cuts([(graph["0.0"], [0])])
    snapshot = Snapshot(model, optimizer)
    apply_cuts(model, stale, optimizer)
    with pytest.raises(ValueError, match=r"0.0.weight of the model has shape \(7, 3, 3, 3\)"):
        apply_cuts(model, stale, optimizer)
    snapshot.restore()
    assert everything(model, optimizer) == before


def test_restore_with_a_live_loss_and_no_optimizer() -> None:
    specimen = ZOO["vgg"]
    model = specimen.model()
    graph = find_groups(model, specimen.inputs())
    snapshot = Snapshot(model)
    remove(model, graph, some_units(graph))
    alive = model(specimen.inputs()).sum()
    alive.backward()
    snapshot.restore()
    model(specimen.inputs()).sum().backward()
    assert model[0][0].weight.grad.shape == model[0][0].weight.shape == (8, 3, 3, 3)
    assert alive.isfinite()
