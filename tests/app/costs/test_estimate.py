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
from rlsprune.app.models.imagenet import resnet50, vgg16, vit_large

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


def test_measured_speeds_are_those_of_a_machine() -> None:
    machine = measure(size=256)
    assert 0.01 < machine.gflops < 1e6
    assert 0.01 < machine.gbytes < 1e5


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
    assert main(["plan", "vgg17"]) == 2
    assert "there is no network 'vgg17'" in capsys.readouterr().err
