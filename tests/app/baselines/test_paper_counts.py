"""The counts in the paper's Tables 1 to 3 that the rivals' settings determine, on the paper's networks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from app.baselines.cases import sgd
from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, SoftPruning, WeightLevel
from rlsprune.app.models import FNN, MiniVGG
from rlsprune.app.run.counting import count_retained, percent, total
from rlsprune.app.run.method import Retained

MNIST, CIFAR = torch.randn(1, 784), torch.randn(1, 3, 32, 32)
FNN_COUNTS = {"input": (784, 0), "fc1": (1024, 802816), "fc2": (512, 524288), "fc3": (10, 5120)}
VGG_COUNTS = {
    "input": (3072, 0),
    "conv1": (65536, 1728),
    "conv2": (65536, 36864),
    "conv3": (32768, 73728),
    "conv4": (32768, 147456),
    "conv5": (16384, 294912),
    "fc1": (1024, 4194304),
    "fc2": (10, 10240),
}


def test_columns_n_and_w() -> None:
    for network, inputs, counts in ((FNN(), MNIST, FNN_COUNTS), (MiniVGG(), CIFAR, VGG_COUNTS)):
        assert {name: left[:2] for name, left in count_retained(network, inputs).items()} == counts


def shares(left: Mapping[str, Retained], whole: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
    rows = {name: (percent(left[name].nodes, n), percent(left[name].weights, w)) for name, (n, w) in whole.items()}
    n, w = (sum(column) for column in zip(*whole.values(), strict=True))
    rows["total"] = (percent(total(left).nodes, n), percent(total(left).weights, w))
    return {name: (round(nodes, 1), round(weights, 1)) for name, (nodes, weights) in rows.items()}


@pytest.mark.parametrize("kind", [L1Norm, DepGraph])
def test_l1_norm_and_depgraph_remove_the_share_from_every_hidden_layer(kind: type[L1Norm] | type[DepGraph]) -> None:
    model = FNN()
    method = kind(model, sgd(model), MNIST, ratio=0.7, prune_epoch=1)
    method.end_epoch(1, 1.0)
    # The paper prints 30.0 for fc2; 153 of 512 are 29.9 and 154 are 30.1.
    assert shares(method.retained(), FNN_COUNTS) == {
        "input": (100.0, 0.0),
        "fc1": (30.0, 30.0),
        "fc2": (29.9, 9.0),
        "fc3": (100.0, 29.9),
        "total": (53.8, 21.7),
    }
    model = MiniVGG()
    method = kind(model, sgd(model), CIFAR, ratio=0.5, prune_epoch=1)
    method.end_epoch(1, 1.0)
    halved = dict.fromkeys(("conv2", "conv3", "conv4", "conv5", "fc1"), (50.0, 25.0))
    assert shares(method.retained(), VGG_COUNTS) == halved | {
        "input": (100.0, 0.0),
        "conv1": (50.0, 50.0),
        "fc2": (100.0, 50.0),
        "total": (50.7, 25.1),
    }


@pytest.mark.parametrize(("make", "x", "counts"), [(FNN, MNIST, FNN_COUNTS), (MiniVGG, CIFAR, VGG_COUNTS)])
def test_soft_pruning_keeps_70_percent_of_every_layer(make: type[nn.Module], x: Tensor, counts: dict) -> None:
    method = SoftPruning(make(), x)
    method.end_epoch(1, 1.0)
    found = shares(method.retained(), counts)
    assert found.pop("input") == (100.0, 0.0)
    assert set(found.values()) == {(100.0, 70.0)}


@pytest.mark.parametrize(
    ("make", "x", "counts", "ratio"), [(FNN, MNIST, FNN_COUNTS, 0.7), (MiniVGG, CIFAR, VGG_COUNTS, 0.5)]
)
def test_weight_level_keeps_the_share_of_the_whole(
    make: type[nn.Module], x: Tensor, counts: dict, ratio: float
) -> None:
    torch.manual_seed(0)  # of some seeds a fresh weight is exactly zero, and counted as gone before the event
    method = WeightLevel(make(), x, ratio=ratio, prune_epoch=1)
    event = method.end_epoch(1, 1.0)
    assert event is not None
    found = shares(method.retained(), counts)
    assert found["total"] == (100.0, round(100 * (1 - ratio), 1))
    assert len(set(found.values())) > 3, "layers lose unequal shares"
    assert (
        event.params_before - event.params_after
        == total(count_retained(make(), x)).weights - total(method.retained()).weights
    )


def test_net_slimming_keeps_as_many_channels_and_nodes_as_in_the_tables() -> None:
    def kept(model: nn.Module, x: Tensor, ratio: float) -> dict[str, int]:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.uniform_(module.weight)
        event = NetSlimming(model, sgd(model), x, ratio=ratio, prune_epoch=1).end_epoch(1, 1.0)
        assert event is not None
        return {layer.name: layer.after for layer in event.layers}

    # Table 1: 35.9 % of 1024 and 16.6 % of 512.
    assert sum(kept(FNN(batch_norm=True), MNIST, 0.7).values()) == 368 + 85
    # Tables 2 and 3: 49.4 % of the 1024 nodes, and for the convolutions 21+61+117+101+19 and 29+60+101+87+42.
    found = kept(MiniVGG(batch_norm=True), CIFAR, 0.5)
    assert found.pop("fc1") == 506
    assert sum(found.values()) == 319
