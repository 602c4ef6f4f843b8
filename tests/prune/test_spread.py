"""One ranking of all layers: what a cut would save, where it is cheapest, and that trying leaves no trace."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from networks import SHAPES, cnn, target, trained
from rlsprune.graph import find_groups, plan_cuts
from rlsprune.profile import parameter_count
from rlsprune.prune.budget import Budget
from rlsprune.prune.spread import STEPS, Costs, share_out
from rlsprune.prune.surgery import apply_cuts
from zoo import ZOO


def held_out_loss(model: nn.Module, make: Callable[[], nn.Sequential] = cnn) -> float:
    generator = torch.Generator().manual_seed(9)
    inputs = torch.rand(64, *SHAPES[make], generator=generator).double()
    with torch.no_grad():
        return float((model(inputs) - target(inputs)).square().sum() / 128)


def spread_pruner(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> rlsprune.Pruner:
    options = {"warmup_epochs": 0, "criterion": "obs", "ratio": 0.3} | options
    example = torch.rand(2, *SHAPES[cnn]).double()
    pruner = rlsprune.Pruner(model, optimizer, example, **{"evaluate": lambda: held_out_loss(model), **options})
    generator = torch.Generator().manual_seed(4)
    pruner.calibrate([torch.rand(64, *SHAPES[cnn], generator=generator).double()])
    return pruner


# --- what would be saved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ZOO))
def test_the_predicted_parameters_are_those_of_the_network_that_was_cut(name: str) -> None:
    model, example = ZOO[name].model(), ZOO[name].inputs()
    graph = find_groups(model, example)
    costs = Costs({name: p.numel() for name, p in model.named_parameters()}, graph.groups)
    gone = {group.name: list(range(group.size // 3)) for group in graph}
    predicted = costs.without({group.name: len(gone[group.name]) / group.size for group in graph})
    apply_cuts(model, plan_cuts([(group, gone[group.name]) for group in graph]), None, [])
    assert predicted == pytest.approx(parameter_count(model))


def test_parameters_and_flops_count_alike() -> None:
    model, example = cnn(), torch.rand(1, *SHAPES[cnn])
    graph = find_groups(model, example)
    budget = Budget(model, example, {})
    before = budget.costs()
    costs = Costs(budget.tensors(), graph.groups)
    assert costs.without({}) == pytest.approx(2.0)
    predicted = costs.without({group.name: (group.size // 3) / group.size for group in graph})
    apply_cuts(model, plan_cuts([(group, list(range(group.size // 3))) for group in graph]), None, [])
    after = budget.costs()
    assert predicted == pytest.approx(after["params"] / before["params"] + after["flops"] / before["flops"])


# --- where it is cheapest ---------------------------------------------------------------------------------------------


def chain_costs(sizes: list[int]) -> tuple[Costs, list[str]]:
    """Of a fully-connected network, and the names of its hidden layers."""
    layers = [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]
    model = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers[:-1]), layers[-1])
    groups = [group for group in find_groups(model, torch.rand(1, sizes[0])) if not group.is_input]
    return Costs(Budget(model, torch.rand(1, sizes[0]), {}).tensors(), groups), [group.name for group in groups]


def total_price(losses: dict[str, list[float]], steps: dict[str, float]) -> float:
    """The increase after so many steps of each group, straight lines between those that were measured."""
    result = 0.0
    for name, number in steps.items():
        points = [0.0, *losses[name]]
        low = min(int(number), STEPS - 1)
        result += points[low] + (number - low) * (points[low + 1] - points[low])
    return result


@pytest.mark.parametrize("seed", range(5))
def test_it_saves_enough_and_is_as_cheap_as_the_best_of_a_grid(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs, names = chain_costs([50, 300, 100, 200, 10])
    ratios = dict.fromkeys(names, 0.4)
    rises = torch.rand(len(names), STEPS, generator=generator).sort(1).values.cumsum(1)  # dearer with every step
    losses = {name: (1.0 + row).tolist() for name, row in zip(names, rises, strict=True)}
    shares = share_out(ratios, losses, 1.0, costs)
    goal = costs.without(ratios)
    assert costs.without(shares) == pytest.approx(goal, rel=1e-3)
    assert costs.without(shares) <= goal

    increases = {name: [loss - 1.0 for loss in after] for name, after in losses.items()}
    taken = {name: math.log(1 - shares.get(name, 0.0)) / math.log(0.6) for name in names}
    grid = [number / 4 for number in range(4 * STEPS + 1)]
    best = min(
        total_price(increases, dict(zip(names, steps, strict=True)))
        for steps in itertools.product(grid, repeat=len(names))
        if costs.without({name: 1 - 0.6**number for name, number in zip(names, steps, strict=True)}) <= goal
    )
    # Greedy, because what one layer saves depends on the others: not always the very best, and never far from it.
    assert total_price(increases, taken) <= 1.25 * best


def test_equally_sensitive_layers_lose_the_more_the_larger_they_are() -> None:
    costs, names = chain_costs([50, 300, 30, 10])
    shares = share_out(dict.fromkeys(names, 0.4), {name: [1.1, 1.3, 1.9] for name in names}, 1.0, costs)
    assert shares[names[0]] > 0.4 > shares.get(names[1], 0.0)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_layer_without_which_nothing_works_is_left_alone(broken: float) -> None:
    costs, names = chain_costs([50, 300, 100, 200, 10])
    losses = {key: [1.1, 1.2, 1.4] for key in names} | {names[1]: [broken] * STEPS}
    assert share_out(dict.fromkeys(names, 0.4), losses, 1.0, costs).keys() == {names[0], names[2]}


def test_a_layer_that_seems_to_cost_nothing_is_not_cut_for_nothing() -> None:
    costs, names = chain_costs([4, 300, 300, 4, 4])
    losses = {key: [1.0, 1.0, 1.0] for key in names} | {names[2]: [1.0 - 1e-6] * STEPS}
    assert share_out(dict.fromkeys(names, 0.4), losses, 1.0, costs).get(names[2], 0.0) == 0.0


# --- events -----------------------------------------------------------------------------------------------------------


def test_an_event_is_that_of_a_pruner_with_these_ratios_as_if_nothing_had_been_tried() -> None:
    model, optimizer = trained(cnn)
    twin, twins = trained(cnn)
    pruner = spread_pruner(model, optimizer)
    sizes = {group.name: group.size for group in pruner.groups}
    event = pruner.prune()
    shares = {name: (len(units) + 1e-6) / sizes[name] for name, units in event.removed.items()}
    assert max(shares.values()) > 0.4 > 0.1 > min(shares.get(name, 0.0) for name in sizes), "nothing was spread"
    plain = spread_pruner(twin, twins, ratio=shares, evaluate=None)
    assert plain.prune().removed == event.removed
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], twins.state_dict()["state"], rtol=0, atol=0)


def test_it_takes_from_the_layer_that_has_doubles() -> None:
    def doubled() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)).double()
        with torch.no_grad():  # three quarters of the second layer's nodes are copies of the others
            model[2].weight[6:], model[2].bias[6:] = model[2].weight[:6].repeat(3, 1), model[2].bias[:6].repeat(3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    inputs = torch.randn(1024, 24, generator=torch.Generator().manual_seed(1)).double()
    changes = {}
    for way in ("spread", "even"):
        model, optimizer = doubled()
        with torch.no_grad():
            outputs = model(inputs)

        def change(model: nn.Module = model, outputs: Tensor = outputs) -> float:
            with torch.no_grad():
                return 1.0 + 1e3 * float((model(inputs) - outputs).square().mean())

        options: dict[str, Any] = {"ratio": 0.4, "input_ratio": 0, "criterion": "obs"}
        evaluate = change if way == "spread" else None
        pruner = rlsprune.Pruner(model, optimizer, inputs[:1], evaluate=evaluate, **options)
        pruner.calibrate([inputs])
        event = pruner.prune()
        changes[way] = (change() - 1.0, event.params_after, len(event.removed["2"]))
    assert changes["spread"][2] > changes["even"][2]
    assert changes["spread"][0] < 0.5 * changes["even"][0]
    assert changes["spread"][1] == pytest.approx(changes["even"][1], rel=0.1)


def test_a_preview_and_a_failure_change_nothing() -> None:
    model, optimizer = trained(cnn)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    pruner = spread_pruner(model, optimizer)
    preview = pruner.preview()
    assert preview.params_after < preview.params_before

    calls = itertools.count()

    def failing() -> float:
        if next(calls) == 4:
            raise RuntimeError("the disk with the images is gone")
        return 1.0

    pruner.evaluate = failing
    with pytest.raises(RuntimeError, match="the disk"):
        pruner.prune()
    pruner.evaluate = lambda: math.nan
    with pytest.raises(ValueError, match=r"evaluate\(\) gave nan"):
        pruner.prune()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert not pruner.history
