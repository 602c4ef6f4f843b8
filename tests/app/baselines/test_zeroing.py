"""Soft pruning and weight level: which weights are zero, which stay zero, and which may come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.baselines.cases import SHAPE, epoch, inputs, sgd, small
from rlsprune.app.baselines import SoftPruning, WeightLevel
from rlsprune.app.baselines.zeroing import layer_weights, ratio_at, smallest
from rlsprune.app.run.counting import count_retained

NAMES = ("0.weight", "4.weight", "9.weight", "12.weight")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in NAMES}


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name not in NAMES}


def test_soft_pruning_zeroes_the_smallest_of_each_layer_and_nothing_else() -> None:
    model = small()
    before, rest = weights(model), others(model)
    SoftPruning(model, inputs(), ratio=0.3).end_epoch(1, 1.0)
    for name, after in weights(model).items():
        old = before[name]
        stay = int(0.7 * old.numel())
        threshold = old.abs().flatten().sort(descending=True).values[stay - 1]
        assert torch.equal(after, torch.where(old.abs() >= threshold, old, 0.0)), name
        assert int(after.count_nonzero()) == stay
    assert all(torch.equal(value, rest[name]) for name, value in others(model).items())


def test_softly_pruned_weights_come_back_and_others_go() -> None:
    model = small()
    optimizer = sgd(model)
    method = SoftPruning(model, inputs())
    zero = []
    for number in (1, 2):
        loss = epoch(model, optimizer, method, SHAPE, seed=number)
        alive = method.retained()
        assert all(alive[name].weights == count_retained(model, inputs())[name].weights for name in alive)
        event = method.end_epoch(number, loss)
        assert event.params_after == event.params_before - sum(int(w.eq(0).sum()) for w in weights(model).values())
        zero.append({name: weight == 0 for name, weight in weights(model).items()})
    for name in NAMES:
        assert bool((zero[0][name] & ~zero[1][name]).any()), name
        assert bool((zero[1][name] & ~zero[0][name]).any()), name
        assert int(zero[0][name].sum()) == int(zero[1][name].sum())


def test_weight_level_has_one_threshold_over_all_weights() -> None:
    model = small()
    before, rest = weights(model), others(model)
    event = WeightLevel(model, inputs(), ratio=0.6, prune_epoch=1).end_epoch(1, 1.0)
    ranked = torch.cat([weight.abs().flatten() for weight in before.values()]).sort(descending=True).values
    stay = int(0.4 * len(ranked))
    for name, after in weights(model).items():
        assert torch.equal(after, torch.where(before[name].abs() >= ranked[stay - 1], before[name], 0.0)), name
    assert all(torch.equal(value, rest[name]) for name, value in others(model).items())
    assert event is not None
    assert event.params_before - event.params_after == len(ranked) - stay


def test_weight_level_masks_hold_while_the_rest_trains() -> None:
    model = small()
    optimizer = sgd(model)
    method = WeightLevel(model, inputs(), ratio=0.6, prune_epoch=2)
    epoch(model, optimizer, method, SHAPE, seed=1)
    assert method.end_epoch(1, 1.0) is None
    assert all(weight.all() for weight in weights(model).values())
    epoch(model, optimizer, method, SHAPE, seed=2)
    method.end_epoch(2, 1.0)
    masked, retained = weights(model), method.retained()
    for number in (3, 4):
        epoch(model, optimizer, method, SHAPE, seed=number)
        assert method.end_epoch(number, 1.0) is None
    for name, after in weights(model).items():
        assert torch.equal(after == 0, masked[name] == 0), name
        assert bool((after != masked[name])[masked[name] != 0].all()), name
    assert method.retained() == retained


def test_state_keeps_the_masks_even_where_a_weight_that_stays_is_zero() -> None:
    model = small()
    method = WeightLevel(model, inputs(), ratio=0.6, prune_epoch=1)
    method.end_epoch(1, 1.0)
    place = tuple(model[0].weight.detach().nonzero()[0].tolist())
    with torch.no_grad():
        model[0].weight[place] = 0
    again = small()
    other = WeightLevel(again, inputs(), ratio=0.6, prune_epoch=1)
    other.load_state_dict(method.state_dict())
    with torch.no_grad():
        for name in NAMES:
            again.get_parameter(name).fill_(1)
    other.after_step()
    assert again[0].weight[place] == 1
    assert (
        sum(int(weight.sum()) for weight in weights(again).values())
        == sum(int(weight.count_nonzero()) for weight in weights(model).values()) + 1
    )


def test_a_copy_is_zeroed_with_the_network_and_softly_by_its_own_weights() -> None:
    model, average = small(0), small(1)
    hard = WeightLevel(model, inputs(), ratio=0.5, prune_epoch=1)
    hard.follow(average)
    hard.end_epoch(1, 1.0)
    assert all(bool((average.get_parameter(n)[w == 0] == 0).all()) for n, w in weights(model).items())
    model, average = small(0), small(1)
    expected = small(1)
    SoftPruning(expected, inputs(), ratio=0.5).end_epoch(1, 1.0)
    soft = SoftPruning(model, inputs(), ratio=0.5)
    soft.follow(average)
    soft.end_epoch(1, 1.0)
    assert all(torch.equal(w, weights(expected)[n]) for n, w in weights(average).items())


def test_the_share_to_zero_leaves_the_target_of_all_parameters() -> None:
    model = small()
    total = sum(p.numel() for p in model.parameters())
    model_zeros = WeightLevel(model, inputs(), ratio=ratio_at(model, 0.3), prune_epoch=1)
    event = model_zeros.end_epoch(1, 1.0)
    assert event is not None
    assert 0.3 * total - 1 <= event.params_after <= 0.3 * total
    with pytest.raises(ValueError, match=r"target=0\.01 cannot be reached: biases and norms"):
        ratio_at(model, 0.01)


def test_equal_weights_and_channels_last_weights_are_counted_exactly() -> None:
    equal = [torch.ones(5, 3), torch.ones(2, 2)]
    assert sum(int(mask.sum()) for mask in smallest(equal, 0.5)) == 19 - 9
    weight = torch.randn(6, 4, 3, 3)
    (mask,) = smallest([weight.to(memory_format=torch.channels_last)], 0.5)
    assert torch.equal(mask, smallest([weight], 0.5)[0])


def test_shared_weights_count_once_and_biases_and_norms_are_no_weights() -> None:
    model = small()
    model.append(nn.ReLU()).append(nn.Linear(5, 5)).append(nn.Linear(5, 5))
    model[15].weight = model[14].weight
    assert list(layer_weights(model)) == [*NAMES, "14.weight"]
