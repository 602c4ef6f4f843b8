"""The moving average of a network's weights."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from rlsprune.app.baselines import L1Norm
from rlsprune.training.average import MovingAverage


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_weights_and_statistics_are_averaged_and_counts_copied() -> None:
    model = network()
    average = MovingAverage(model, steps=2.0)
    weights, means = [], []
    for _ in range(12):
        with torch.no_grad():
            model[0].weight.add_(torch.rand(4, 3))
        model(torch.rand(8, 3))
        weights.append(model[0].weight.detach().clone())
        means.append(model[1].running_mean.clone())
        average.update(model)
    shares = [max(1 / 2, 3 / (3 + step)) for step in range(12)]
    for seen, found in ((weights, average.network[0].weight), (means, average.network[1].running_mean)):
        expected = torch.zeros_like(seen[0])
        for share, value in zip(shares, seen, strict=True):
            expected = (1 - share) * expected + share * value
        assert torch.allclose(found, expected, atol=1e-6)
    assert int(average.network[1].num_batches_tracked) == 12


def test_it_reaches_back_a_third_of_the_way_at_first() -> None:
    model = network()
    average = MovingAverage(model, steps=1e9)
    with torch.no_grad():
        model[0].weight.fill_(0.0)
        for _ in range(10):
            average.update(model)
        model[0].weight.fill_(1.0)
        for _ in range(10):
            average.update(model)
    assert 0.8 < float(average.network[0].weight.detach().mean()) < 0.95  # a plain mean of the twenty would be a half


def test_it_goes_on_from_its_state() -> None:
    model = network()
    whole = MovingAverage(model, steps=50.0)
    for _ in range(3):
        whole.update(model)
    other = MovingAverage(model, steps=50.0)
    other.load_state_dict(whole.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    for average in (whole, other):
        average.update(model)
    assert torch.equal(whole.network[0].weight, other.network[0].weight)


@pytest.mark.parametrize("steps", [0.0, 0.3])
def test_less_than_a_step_is_the_last_step(steps: float) -> None:
    model = network()
    average = MovingAverage(model, steps)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update(model)
    assert torch.equal(average.network[0].weight, model[0].weight)


def test_a_mask_with_infinities_is_copied() -> None:
    model = network()
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))
    average = MovingAverage(model, steps=5.0)
    average.update(model)
    assert torch.equal(average.network.get_buffer("mask"), model.get_buffer("mask"))


def test_a_rival_prunes_the_average_as_it_prunes_the_network() -> None:
    model = network()
    method = L1Norm(model, SGD(model.parameters(), lr=0.1), torch.rand(2, 3), ratio=0.5, prune_epoch=1)
    average = MovingAverage(model, 5.0)
    method.follow(average.network)
    assert method.end_epoch(1, 0.5) is not None
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in average.network.named_parameters()} == shapes
    average.update(model)
