"""RLS agrees with the slow float64 reference of the paper over many steps, whatever the settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rlsprune
from reference.training import ReferenceRLS, paper_loss
from rlsprune.optim import layer_step

SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.floats(0.01, 1.0),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "forgetting": st.sampled_from([1.0, 0.999, 0.97]),
        "mean_scale": st.floats(0.01, 1.0),
        "p0": st.floats(0.1, 2.0),
        "weight_decay": st.sampled_from([0.0, 1e-3]),
    }
)
LAYERS = st.fixed_dictionaries(
    {
        "kernel_size": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "stride": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "padding": st.sampled_from([0, 1, (0, 1), "valid"]),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2, 4]),
        "bias": st.booleans(),
        "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    }
)


def train_both(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], **options: Any
) -> tuple[rlsprune.RLS, ReferenceRLS]:
    reference = ReferenceRLS(copy.deepcopy(model).double(), **{k: v for k, v in options.items() if k != "rank"})
    optimizer = rlsprune.RLS(model, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_step, "WIND_UP_LIMIT", float("inf"))  # the paper has no such guard
        for inputs, targets in batches:
            optimizer.zero_grad()
            paper_loss(model(inputs), targets).backward()
            optimizer.step()
            reference.step(inputs.double(), targets.double(), paper_loss)
    return optimizer, reference


def assert_agree_unless_diverged(model: nn.Module, batches: list[tuple[Tensor, Tensor]], **options: Any) -> None:
    """Some settings diverge, and near that the smallest rounding grows by orders of magnitude."""
    try:
        optimizer, reference = train_both(model, batches, **options)
    except FloatingPointError:
        reject()
    assume(all(float(p.detach().abs().max()) < 10 for p in reference.model.parameters()))
    assert_agree(model, optimizer, reference, rtol=1e-7, atol=1e-9)


def assert_agree(model: nn.Module, optimizer: rlsprune.RLS, reference: ReferenceRLS, rtol: float, atol: float) -> None:
    for name, P in reference.P.items():
        torch.testing.assert_close(
            optimizer.inverse(name).double(), P, rtol=rtol, atol=atol, msg=f"P of layer {name!r}"
        )
    expected = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=rtol, atol=atol, msg=name)


@given(SETTINGS, st.sampled_from([1, 3, 64]), st.booleans(), st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_fully_connected_network(options: dict[str, Any], batch: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9, bias=bias), nn.ReLU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batches = [(torch.rand(batch, 6).double(), torch.rand(batch, 3).double()) for _ in range(40)]
    assert_agree_unless_diverged(model, batches, **options)


@given(SETTINGS, LAYERS, st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_convolutional_network(options: dict[str, Any], layer: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    first = nn.Conv2d(4, 8, **layer)
    side = first(torch.rand(1, 4, 7, 8)).shape
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(side.numel(), 2)).double()
    batches = [(torch.rand(3, 4, 7, 8).double(), torch.rand(3, 2).double()) for _ in range(8)]
    assert_agree_unless_diverged(model, batches, **options)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (
            nn.Sequential(nn.Conv2d(4, 6, 3, padding="same", dilation=2), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()),
            (4, 6, 6),
        ),
        (nn.Sequential(nn.Conv2d(4, 6, (2, 4), padding="same"), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()), (4, 6, 6)),
        (nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool1d(3), nn.Flatten()), (4, 6)),
        (nn.Sequential(nn.Conv3d(2, 6, 2, padding=1), nn.ReLU(), nn.AvgPool3d(5), nn.Flatten()), (2, 4, 4, 4)),
        (nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()), (6, 6, 6)),
    ],
    ids=["same-dilated", "same-even", "conv1d", "conv3d", "depthwise"],
)
def test_other_convolutions(model: nn.Sequential, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = [(torch.rand(3, *shape).double(), torch.rand(3, 6).double()) for _ in range(10)]
    assert_agree(model, *train_both(model.double(), batches), rtol=1e-8, atol=1e-10)


def test_hundreds_of_float32_steps_stay_near_the_reference() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 24), nn.ReLU(), nn.Linear(24, 3))
    images = torch.rand(40, 1, 8, 8)
    targets = torch.stack([images.mean((1, 2, 3)), images.amax((1, 2, 3)), images[:, 0, 2, 2]], 1)
    picks = [torch.randint(40, (16,)) for _ in range(300)]
    trained = train_both(model, [(images[p], targets[p]) for p in picks], lr=0.3, rank=None)
    assert_agree(model, *trained, rtol=2e-3, atol=2e-4)


def test_inputs_with_leading_dimensions_are_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double()
    batches = [(torch.rand(2, 3, 4, 5).double(), torch.rand(2, 3, 4, 2).double()) for _ in range(10)]
    assert_agree(model, *train_both(model, batches), rtol=1e-9, atol=1e-11)


def test_each_layer_has_its_own_learning_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double()
    reference = ReferenceRLS(copy.deepcopy(model), lr={"0": 0.1, "2": 0.7})
    optimizer = rlsprune.RLS(model)
    for group in optimizer.param_groups:
        group["lr"] = {"0": 0.1, "2": 0.7}[group["name"]]
    for _ in range(10):
        inputs, targets = torch.rand(4, 5).double(), torch.rand(4, 2).double()
        optimizer.zero_grad()
        paper_loss(model(inputs), targets).backward()
        optimizer.step()
        reference.step(inputs, targets, paper_loss)
    assert_agree(model, optimizer, reference, rtol=1e-10, atol=1e-12)
