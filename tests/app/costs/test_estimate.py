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
from rlsprune.app.costs.estimate import Machine, make_plan, measure
from rlsprune.app.models.decoder import decoder_8b
from rlsprune.app.models.imagenet import resnet50, vgg16, vit_large
from rlsprune.statistics.inputs import rows_kept

MACHINE = Machine(gflops=50, gbytes=10)


@pytest.mark.parametrize("rank", [None, 4, 16])
@pytest.mark.parametrize("make", [fnn, cnn])
def test_the_planned_memory_is_what_the_optimizer_takes(make: Any, rank: int | None) -> None:
    model = make()
    plan = make_plan(model, 1, 32, MACHINE, rank)
    optimizer = rlsprune.RLS(model, lr=0.1, rank=rank)
    train(model, optimizer, SHAPES[make], steps=1)
    used = optimizer.memory_usage()
    assert sum(layer.inverse_bytes for layer in plan.layers) == used["inverse"]
    assert plan.state_bytes == used["total"]


def test_ranks_send_each_other_mean_inputs_beside_the_gradients() -> None:
    with torch.device("meta"):
        model = resnet50()
    assert make_plan(model, 1, 256, MACHINE).sent_bytes() == {"gradients": 0, "means": 0}
    plan = make_plan(model, 8, 256, MACHINE)
    inputs = sum(layer.inputs + 2 for layer in plan.layers)
    assert plan.sent_bytes()["means"] == round(2 * 7 / 8 * 4 * inputs)
    assert plan.sent_bytes()["means"] < 0.01 * plan.sent_bytes()["gradients"]


def test_the_step_of_a_wide_layer_costs_two_thin_products() -> None:
    """Of 20.5 rows on average: P whole takes n instead of twice that."""
    model = nn.Linear(4095, 1024)
    factored, whole = (make_plan(model, 1, 128, Machine(1, 1e9), rank).seconds for rank in (16, None))
    assert whole / factored == pytest.approx(4096 / (2 * 20.5), rel=0.02)


@pytest.mark.parametrize(
    ("build", "parameters"), [(vgg16, 138_357_544), (resnet50, 25_557_032), (vit_large, 304_326_632)]
)
def test_the_built_in_networks_have_their_published_number_of_parameters(build: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = build()
        outputs = model(torch.rand(2, 3, 224, 224))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert outputs.shape == (2, 1000)


def test_the_decoder_has_its_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = decoder_8b()
        outputs = model(torch.zeros(2, 16, dtype=torch.long))
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert outputs.shape == (2, 16, 128_256)


def test_what_fully_shard_divides_and_what_it_does_not() -> None:
    with torch.device("meta"):
        model = decoder_8b()
    alone, many = (make_plan(model, ranks, ranks, MACHINE, sharded=True, flops=10**12) for ranks in (1, 64))
    assert many.inverse_bytes == alone.inverse_bytes
    assert many.velocity_bytes == alone.velocity_bytes
    assert many.state_bytes == alone.inverse_bytes + alone.velocity_bytes // 64
    assert many.largest_bytes == 4 * 128_256 * 4096, "the embedding, which is larger than a block"
    rest = 2 * many.parameter_bytes + many.velocity_bytes
    assert rest / many.ranks_to_outgrow <= many.inverse_bytes < rest / (many.ranks_to_outgrow - 1)
    once = 63 / 64
    assert many.sent_bytes()["gradients"] == round(3 * once * many.parameter_bytes)
    step, rls, event, shrink = many.work()
    assert step.memory + rls.memory == many.training_bytes
    # All weights and velocities twice, and 1,024 rows of each layer, as all have more than 2,048 inputs.
    rows = 4 * 1024 * sum(layer.inputs for layer in many.layers)
    assert event.sent == pytest.approx(once * (rows + 2 * (many.parameter_bytes + many.velocity_bytes)))
    assert shrink.memory > 3 * many.parameter_bytes
    assert all(work.sent == 0 for work in alone.work())


def test_the_planned_rows_are_those_that_are_sampled() -> None:
    """Of one rank: what the statistics hold when enough batches were seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 30), nn.ReLU(), nn.Linear(30, 2200), nn.ReLU(), nn.Linear(2200, 3))
    statistics = rlsprune.InputStatistics(model)
    for _ in range(20):
        model(torch.rand(128, 700))
    held = {
        name: sum(rows.nbytes for rows, _ in collector._batches) for name, collector in statistics._collectors.items()
    }
    inputs = {layer.name: layer.inputs for layer in make_plan(model, 1, 128, MACHINE).layers}
    planned = {name: 4 * rows_kept(n - 1) * n for name, n in inputs.items()}
    # A batch gives 128 rows, and the last one that is needed is kept whole.
    assert all(planned[name] <= held[name] < planned[name] + 4 * 128 * inputs[name] for name in held)


def test_measured_speeds_are_those_of_a_machine() -> None:
    machine = measure(size=256)
    assert 0.01 < machine.gflops < 1e6
    assert 0.01 < machine.gbytes < 1e5


@pytest.mark.parametrize(
    ("network", "ranks", "told"), [("resnet50", 1, True), ("resnet50", 2, False), ("vgg16", 1, False)]
)
def test_events_that_are_refitted_as_a_whole_are_told_of(
    network: str, ranks: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", network, "--world-size", str(ranks), "--gflops", "50", "--gbytes", "10"]) == 0
    assert ("a single process refits the network as a whole" in capsys.readouterr().out) == told


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = ["--gflops", "50", "--gbytes", "10"]
    assert main(["plan", "vgg16", "--world-size", "8", "--batch", "256", "--memory", "4", *speeds]) == 0
    printed = capsys.readouterr().out
    assert "2.3 MiB" in printed  # P of the first fully-connected layer: 24 rows of 25,089 numbers
    assert "it fits" in printed
    assert main(["plan", "vgg16", "--rank", "0", "--memory", "4", *speeds]) == 0
    printed = capsys.readouterr().out
    assert "2.34 GiB" in printed  # 25,089² numbers
    assert "it does not fit" in printed
    assert main(["plan", "digits-fnn", "--json", *speeds]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["inputs"] == 785
    assert main(["plan", "decoder_8b", "--world-size", "1024", "--sharded", *speeds]) == 0
    printed = capsys.readouterr().out
    assert "from 797 processes on" in printed
    assert "shrink" in printed
    assert main(["plan", "vgg16", "--link", "0"]) == 2
    assert "link=0.0 is not valid: it must be above 0" in capsys.readouterr().err
    assert main(["plan", "vgg17"]) == 2
    assert "there is no network 'vgg17'" in capsys.readouterr().err
