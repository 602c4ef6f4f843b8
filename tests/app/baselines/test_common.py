"""What holds for every rival: when it prunes, that training and resuming go on, what it refuses."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from app.baselines.cases import RIVALS, STRUCTURED, epoch, inputs, sgd, small
from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.app.baselines.common import lowest_overall, stays
from rlsprune.app.run.counting import count_retained, total
from rlsprune.graph import find_groups
from zoo import ZOO, evaluate

SPECIMENS = ("small", "resnet-basic", "mobilenet", "densenet")


@pytest.mark.parametrize("specimen", SPECIMENS)
@pytest.mark.parametrize("name", RIVALS)
def test_network_shrinks_or_thins_once_and_every_parameter_goes_on_training(name: str, specimen: str) -> None:
    model, x = (small(), inputs()) if specimen == "small" else (ZOO[specimen].model(), ZOO[specimen].inputs())
    optimizer = sgd(model)
    method = RIVALS[name](model, optimizer, x)
    whole = total(method.retained())
    parameters = list(model.parameters())
    event = None
    for number in (1, 2):
        loss = epoch(model, optimizer, method, x.shape, seed=number)
        event = method.end_epoch(number, loss)
        assert (event is None) == (number == 1 and name != "soft-pruning")
    assert event is not None
    assert event.epoch == 2
    assert event.loss == loss
    assert event.params_after < event.params_before
    assert total(method.retained()).weights < whole.weights
    structured = name in STRUCTURED
    assert (event.flops_after < event.flops_before) == structured
    assert {change.name: change.before - change.after for change in event.layers if change.after < change.before} == {
        group: len(units) for group, units in event.removed.items()
    }
    assert bool(event.removed) == structured
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))

    before = [parameter.detach().clone() for parameter in parameters]
    epoch(model, optimizer, method, x.shape, seed=3)
    for parameter, old in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        assert not torch.equal(parameter, old)
    assert (method.end_epoch(3, loss) is None) == (name != "soft-pruning")
    assert method.finish() is None


@pytest.mark.parametrize("name", STRUCTURED)
def test_units_that_go_are_removed_as_the_event_says(name: str) -> None:
    model, x = small(), inputs()
    method = STRUCTURED[name](model, sgd(model), x)
    event = method.end_epoch(2, 1.0)
    masked = small()
    for group in find_groups(masked, x):
        for member in group.consumers:
            columns = member.index[event.removed.get(group.name, [])].flatten()
            member.module.weight.data[:, columns] = 0
    torch.testing.assert_close(evaluate(model, x), evaluate(masked, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_run_goes_on_like_one_that_was_never_interrupted(name: str, stop: int) -> None:
    x = inputs()

    def run(model, optimizer, method, epochs: range) -> None:
        for number in epochs:
            method.end_epoch(number, epoch(model, optimizer, method, x.shape, seed=number))

    model = small()
    optimizer = sgd(model)
    method = RIVALS[name](model, optimizer, x)
    run(model, optimizer, method, range(1, stop + 1))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "method": method.state_dict()}, file)
    values = [tensor.clone() for tensor in model.state_dict().values()]
    run(model, optimizer, method, range(stop + 1, 5))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = small()
    resize(again, values)
    other = sgd(again)
    other.load_state_dict(saved["optimizer"])
    resumed = RIVALS[name](again, other, x)
    resumed.load_state_dict(saved["method"])
    run(again, other, resumed, range(stop + 1, 5))
    assert resumed.retained() == method.retained()
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def resize(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Give a whole network the sizes and values of a pruned one."""
    for tensor, value in zip(model.state_dict(keep_vars=True).values(), values, strict=True):
        tensor.data = value.clone()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv2d):
            module.out_channels, module.in_channels = module.weight.shape[:2]
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.num_features = len(module.weight)


@pytest.mark.parametrize("name", [name for name in RIVALS if name != "soft-pruning"])
def test_a_later_epoch_prunes_too_if_the_first_was_missed_but_never_twice(name: str) -> None:
    model, x = small(), inputs()
    method = RIVALS[name](model, sgd(model), x)
    assert method.end_epoch(7, 1.0) is not None
    assert method.end_epoch(8, 1.0) is None


def test_with_a_share_of_the_time_the_number_of_the_epoch_does_not_matter() -> None:
    model, x = small(), inputs()
    method = L1Norm(model, sgd(model), x, ratio=0.5, prune_epoch=2)
    method.prune_share = 0.4
    for epoch_number, spent in ((2, 0.1), (3, 0.39)):
        method.spent(spent)
        assert method.end_epoch(epoch_number, 1.0) is None
    method.spent(0.4)
    assert method.end_epoch(4, 1.0) is not None


def test_unpruned_twin_never_prunes() -> None:
    model, x = small(), inputs()
    optimizer = sgd(model)
    twins = [kind(model, optimizer, x, ratio=0.5, prune_epoch=None) for kind in (L1Norm, NetSlimming, DepGraph)]
    for twin in [*twins, WeightLevel(model, x, ratio=0.5, prune_epoch=None)]:
        assert twin.end_epoch(1000, 0.0) is None
        assert twin.retained() == count_retained(model, x)


def test_bad_arguments_are_refused_with_their_value() -> None:
    model, x = small(), inputs()
    optimizer = sgd(model)
    for ratio in (0, 1, -0.5, float("nan")):
        with pytest.raises(ValueError, match=f"ratio={ratio}"):
            L1Norm(model, optimizer, x, ratio=ratio, prune_epoch=1)
        with pytest.raises(ValueError, match=f"ratio={ratio}"):
            SoftPruning(model, x, ratio=ratio)
    with pytest.raises(ValueError, match="prune_epoch=0"):
        WeightLevel(model, x, ratio=0.5, prune_epoch=0)
    with pytest.raises(ValueError, match="penalty=-1"):
        NetSlimming(model, optimizer, x, ratio=0.5, prune_epoch=1, penalty=-1)
    with pytest.raises(ValueError, match="scope='all'"):
        DepGraph(model, optimizer, x, ratio=0.5, prune_epoch=1, scope="all")


def test_network_without_hidden_layers_or_weights_is_refused_before_training() -> None:
    linear = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"no hidden layer .*reach the network's output"):
        L1Norm(linear, sgd(linear), torch.randn(1, 4), ratio=0.5, prune_epoch=1)
    with pytest.raises(ValueError, match="no weights to prune"):
        SoftPruning(nn.PReLU(), torch.randn(1, 4))
    masked = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="the weight of '0' is parametrised"):
        WeightLevel(masked, torch.randn(1, 4), ratio=0.5, prune_epoch=1)


@pytest.mark.parametrize("name", STRUCTURED)
def test_weights_that_are_not_finite_are_named_and_nothing_is_cut(name: str) -> None:
    model, x = small(), inputs()
    method = STRUCTURED[name](model, sgd(model), x)
    with torch.no_grad():
        model[0].weight[0] = torch.nan
        model[1].weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"weights of '0' are not finite"):
        method.end_epoch(2, 1.0)
    assert model[0].weight.shape[0] == 8


def test_state_of_another_method_is_refused() -> None:
    model, x = small(), inputs()
    method = WeightLevel(model, x, ratio=0.5, prune_epoch=1)
    with pytest.raises(ValueError, match=r"not one of WeightLevel: missing \['zeroed'\]"):
        method.load_state_dict({"pruned": True})
    with pytest.raises(
        ValueError, match=r"mask of '0.weight' has shape \(2,\); the network's weight is \(8, 3, 3, 3\)"
    ):
        method.load_state_dict({"pruned": True, "zeroed": {"0.weight": torch.ones(2, dtype=torch.bool)}})
    with pytest.raises(ValueError, match=r"mask of 'x' .* is missing"):
        method.load_state_dict({"pruned": True, "zeroed": {"x": torch.ones(2, dtype=torch.bool)}})


def test_how_many_stay() -> None:
    # In floating point, 1 - 0.7 times 10 is above 3 and 1 - 0.9 times 10 below 1.
    assert [stays(10, ratio) for ratio in (0.1, 0.3, 0.7, 0.9)] == [9, 7, 3, 1]
    assert stays(1024, 0.7) == 307
    assert stays(3, 0.9) == 1
    assert all(stays(100 * n, k / 100) == (100 - k) * n for n in (1, 7, 1234, 47592) for k in range(1, 100))


def test_ranked_together_one_unit_of_each_layer_stays() -> None:
    low, high = torch.tensor([0.2, 0.3, 0.1]), torch.tensor([2.0, 1.0, 4.0, 3.0])
    assert [units.tolist() for units in lowest_overall([low, high], 4)] == [[0, 2], [1]]
    assert [units.tolist() for units in lowest_overall([low, high], 2)] == [[0, 2], []]
    assert [units.tolist() for units in lowest_overall([low, high], 7)] == [[0, 2], [0, 1, 3]]
