"""The plan says what the optimizer then takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from networks import SHAPES, cnn, fnn, train
from rlsprune.app.cli.main import main
from rlsprune.app.costs.estimate import Machine, fitting_block_size, make_plan, measure
from rlsprune.app.models.imagenet import resnet50, vgg16

MACHINE = Machine(gflops=50, gbytes=10)


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("make", [fnn, cnn])
def test_the_planned_memory_is_what_the_optimizer_takes(make: Any, block_size: int | None) -> None:
    model = make()
    plan = make_plan(model, 1, 32, MACHINE, block_size)
    optimizer = rlsprune.RLS(model, lr=0.1, block_size=block_size)
    train(model, optimizer, SHAPES[make], steps=1)
    used = optimizer.memory_usage()
    assert sum(layer.inverse_bytes for layer in plan.layers) == used["inverse"]
    assert plan.state_bytes == used["total"]


def test_ranks_share_what_one_would_keep() -> None:
    with torch.device("meta"):
        model = resnet50()
    whole = make_plan(model, 1, 256, MACHINE)
    for ranks in (2, 8, 64):
        plan = make_plan(model, ranks, 256, MACHINE)
        kept = sum(plan.rank_bytes(rank) - plan.fallback_bytes for rank in range(ranks))
        assert kept == whole.state_bytes - whole.fallback_bytes
        # No rank can have less than the largest layer, nor all of them less than their share.
        dearest = max(layer.seconds for layer in plan.layers)
        assert (
            max(dearest, plan.seconds / ranks)
            <= plan.slowest_rank_seconds
            <= 4 / 3 * max(dearest, plan.seconds / ranks)
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_balance_gives_every_item_to_a_rank_and_none_much_more_than_its_share(ranks: int) -> None:
    costs = [float(cost) for cost in torch.rand(40, generator=torch.Generator().manual_seed(ranks)).tolist()]
    owners = balance(costs, ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == pytest.approx(sum(costs))
    assert max(loads) <= sum(costs) / ranks * 4 / 3


@pytest.mark.parametrize(("build", "parameters"), [(vgg16, 138_357_544), (resnet50, 25_557_032)])
def test_the_built_in_networks_have_their_published_number_of_parameters(build: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = build()
        outputs = model(torch.rand(2, 3, 224, 224))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert outputs.shape == (2, 1000)


def test_the_block_size_that_is_proposed_fits_and_twice_it_does_not() -> None:
    with torch.device("meta"):
        model = vgg16()
    plan = make_plan(model, 1, 256, MACHINE)
    block_size = fitting_block_size(model, plan, 2 * 2**30)
    assert block_size is not None
    assert make_plan(model, 1, 256, MACHINE, block_size).training_bytes <= 2 * 2**30
    assert make_plan(model, 1, 256, MACHINE, 2 * block_size).training_bytes > 2 * 2**30
    assert fitting_block_size(model, plan, 1) is None


def test_a_small_batch_takes_the_cheaper_way_on_one_cpu_alone() -> None:
    model = nn.Sequential(nn.Linear(512, 512))
    seconds = [make_plan(model, *case, MACHINE).seconds for case in ((1, 16), (1, 10**6), (2, 16))]
    assert seconds[0] < seconds[1] == seconds[2]


def test_measured_speeds_are_those_of_a_machine() -> None:
    machine = measure(size=256)
    assert 0.01 < machine.gflops < 1e6
    assert 0.01 < machine.gbytes < 1e5


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = ["--gflops", "50", "--gbytes", "10"]
    assert main(["plan", "vgg16", "--world-size", "8", "--batch", "256", "--memory", "4", *speeds]) == 0
    printed = capsys.readouterr().out
    assert "2.34 GiB" in printed  # P of the first fully-connected layer: 25,089² numbers
    assert "it fits" in printed
    assert main(["plan", "digits-fnn", "--json", *speeds]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["inputs"] == 785
    assert main(["plan", "vgg17"]) == 2
    assert "there is no network 'vgg17'" in capsys.readouterr().err
