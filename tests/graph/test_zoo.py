"""Every architecture: the right groups are found, and what is found can really go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlsprune.graph import Group, find_groups
from rlsprune.prune.snapshot import Snapshot
from zoo import ZOO, evaluate, remove, some_units, zeroed_output

pytestmark = pytest.mark.parametrize("name", ZOO)


def test_groups_are_those_expected_and_in_the_order_of_execution(name: str) -> None:
    specimen = ZOO[name]
    graph = find_groups(specimen.model(), specimen.inputs())
    assert [(group.name, group.size) for group in graph] == list(specimen.groups.items())
    assert set(specimen.skipped) <= set(graph.skipped)
    assert not set(graph.skipped) & set(specimen.groups)
    assert all(graph.skipped.values())


def test_pruned_equals_zeroed_twice_in_sequence(name: str) -> None:
    specimen = ZOO[name]
    model, x = specimen.model(), specimen.inputs(seed=2)
    graph = find_groups(model, specimen.inputs())
    for event in range(2):
        chosen = some_units(graph, seed=event)
        assert chosen
        whole, expected = evaluate(model, x), zeroed_output(model, chosen, x)
        remove(model, graph, chosen)
        torch.testing.assert_close(evaluate(model, x), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(whole, expected, atol=1e-4), "the units that went had no effect: nothing was tested"


def test_each_group_alone_equals_zeroed_and_comes_back(name: str) -> None:
    specimen = ZOO[name]
    model, x = specimen.model(), specimen.inputs(seed=2)
    graph = find_groups(model, specimen.inputs())
    whole = evaluate(model, x)
    for key in specimen.groups:
        if graph[key].is_input:
            continue
        before, groups = Snapshot(model), graph.groups
        chosen = [(graph[key], torch.tensor([0, graph[key].size - 1][: graph[key].size - 1]))]
        expected = zeroed_output(model, chosen, x)
        remove(model, graph, chosen)
        torch.testing.assert_close(evaluate(model, x), expected, rtol=1e-5, atol=1e-5)
        before.restore()
        graph.groups = groups
        assert torch.equal(evaluate(model, x), whole)


def test_shrunk_maps_are_those_of_a_fresh_trace(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    graph = find_groups(model, specimen.inputs())
    remove(model, graph, some_units(graph))
    fresh = find_groups(model, specimen.inputs())
    # With a single unit left a group can go no further, and a fresh trace says so.
    left = [group for group in graph if group.size > 1]
    assert [group.name for group in fresh] == [group.name for group in left]
    for one, other in zip(left, fresh, strict=True):
        assert members(one) == members(other)


def members(group: Group) -> list[tuple[str, str, list[list[int]]]]:
    return [(member.name, member.side, member.index.tolist()) for member in group.members]


def test_attributes_match_the_tensors(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    graph = find_groups(model, specimen.inputs())
    remove(model, graph, some_units(graph))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        elif isinstance(module, nn.ConvTranspose2d):
            assert module.weight.shape[:2] == (module.in_channels, module.out_channels // module.groups)
        elif isinstance(module, nn.modules.conv._ConvNd):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
            assert module.in_channels % module.groups == module.out_channels % module.groups == 0
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor.shape == (module.num_features,)
        elif isinstance(module, nn.GroupNorm):
            assert module.weight.shape == module.bias.shape == (module.num_channels,)
        elif isinstance(module, nn.PReLU):
            assert module.weight.shape == (module.num_parameters,)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_network_trains_on_after_a_prune(name: str, kind: str) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    x, target = specimen.inputs(seed=3, batch=8), torch.randint(0, 2, (8,), generator=torch.Generator().manual_seed(0))
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    optimizer = make[kind](model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        output = model(x).flatten(2).mean(2) if name == "unet" else model(x)
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        return loss

    alive = step()  # a loss that is still alive must not break the next backward
    identities = [id(parameter) for parameter in model.parameters()]
    graph = find_groups(model, specimen.inputs())
    remove(model, graph, some_units(graph), optimizer)
    assert [id(parameter) for parameter in model.parameters()] == identities
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            assert not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape == parameter.shape
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step()
    for (key, parameter), old in zip(model.named_parameters(), before, strict=True):
        assert parameter.grad is not None, key
        # A bias in front of a normalisation has no gradient but rounding.
        if parameter.ndim > 1 or parameter.grad.abs().max() > 1e-6:
            assert not torch.equal(parameter, old), f"{key} did not change"
    assert alive.isfinite()
