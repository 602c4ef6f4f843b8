"""Pruning to a number of input features, and the order in which they went."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlsprune import RLS, Pruner
from rlsprune.model.selector import select_inputs


def table_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))


def train_on_three_columns(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> float:
    """Columns 2, 5 and 7 make the target, the others are noise."""
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(512, 12, generator=generator)
    wanted = torch.stack([table[:, 2] + table[:, 5], table[:, 7]], 1)
    for _ in range(epochs):
        for batch in torch.randperm(512, generator=generator).split(64):
            loss = nn.functional.mse_loss(model(table[batch]), wanted[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


@pytest.mark.parametrize("asked", [3, 0.25, 5])
def test_target_of_inputs_is_met_exactly_and_nothing_else_goes(asked: float) -> None:
    model = table_network()
    optimizer = RLS(model, lr=0.3)
    pruner = Pruner(model, optimizer, torch.rand(1, 12), warmup_epochs=2, tolerance=10.0, target={"inputs": asked})
    for _ in range(14):
        pruner.step(train_on_three_columns(model, optimizer, 1))
    assert pruner.target_reached
    assert pruner.done
    kept = pruner.kept_inputs.tolist()
    assert len(kept) == (3 if asked == 0.25 else asked)
    assert {2, 5, 7} <= set(kept)
    assert (model[0].out_features, model[2].in_features) == (32, 32)
    ranks = pruner.input_ranking
    assert ranks[kept].tolist() == [1] * len(kept)
    order = [sorted(gone) for gone in gone_features(pruner)]
    assert [(ranks == rank).nonzero()[:, 0].tolist() for rank in range(len(order) + 1, 1, -1)] == order


def gone_features(pruner: Pruner) -> Iterator[list[int]]:
    """The original features that each event took."""
    left = list(range(12))
    for event in pruner.history:
        yield [left[unit] for unit in event.removed["input"]]
        left = [feature for unit, feature in enumerate(left) if unit not in event.removed["input"]]


def test_target_of_inputs_and_parameters_is_met_in_both() -> None:
    model = table_network()
    optimizer = RLS(model, lr=0.3)
    target = {"inputs": 4, "params": 0.5}
    pruner = Pruner(model, optimizer, torch.rand(1, 12), warmup_epochs=1, tolerance=10.0, target=target)
    before = sum(p.numel() for p in model.parameters())
    for _ in range(12):
        pruner.step(train_on_three_columns(model, optimizer, 1))
    assert pruner.target_reached
    assert len(pruner.kept_inputs) == 4
    assert sum(p.numel() for p in model.parameters()) <= 0.5 * before
    assert model[0].out_features > 8, "hidden units stay once the parameters are few enough"


def test_ranking_after_a_roll_back() -> None:
    model = table_network()
    pruner = Pruner(model, RLS(model), torch.rand(1, 12), warmup_epochs=0, patience=1, target={"inputs": 6})
    pruner.calibrate([torch.rand(64, 12)])
    first = pruner.step(1.0)
    pruner.calibrate([torch.rand(64, 12)])
    second = pruner.step(0.5)
    pruner.step(2.0)
    assert [event.kind for event in pruner.history] == ["prune", "prune", "roll-back"]
    ranks = pruner.input_ranking
    assert (ranks == 2).nonzero()[:, 0].tolist() == first.removed["input"]
    assert int((ranks == 1).sum()) == 12 - len(first.removed["input"])
    assert second.removed["input"]


def test_ranking_of_a_network_that_had_lost_inputs_before() -> None:
    model = table_network()
    layer = model[0]
    select_inputs(layer, [1, 2, 5, 7, 8, 11])
    layer.weight.data, layer.in_features = layer.weight.data[:, [1, 2, 5, 7, 8, 11]], 6
    pruner = Pruner(model, RLS(model), torch.rand(1, 12), target={"inputs": 4})
    pruner.calibrate([torch.rand(64, 12)])
    before = pruner.kept_inputs.tolist()
    pruner.prune()
    ranks, kept = pruner.input_ranking, pruner.kept_inputs.tolist()
    assert (ranks == 1).nonzero()[:, 0].tolist() == kept
    assert (ranks == 2).nonzero()[:, 0].tolist() == sorted(set(before) - set(kept)) != []
    assert (ranks == 3).nonzero()[:, 0].tolist() == [0, 3, 4, 6, 9, 10]
    resumed = Pruner(model, RLS(model), torch.rand(1, 12), target={"inputs": 4})
    resumed.load_state_dict(pruner.state_dict())
    assert torch.equal(resumed.input_ranking, ranks)


@pytest.mark.parametrize("target", [{"inputs": 0}, {"inputs": 1.5}, {"inputs": "5"}, {"columns": 5}])
def test_targets_that_are_none(target: dict[str, object]) -> None:
    model = table_network()
    with pytest.raises(ValueError, match="or a number of inputs"):
        Pruner(model, RLS(model), torch.rand(1, 12), target=target)


def test_target_of_inputs_needs_flat_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    with pytest.raises(ValueError, match="reads no flat input features that could go"):
        Pruner(model, RLS(model), torch.rand(1, 3, 8, 8), target={"inputs": 2})
