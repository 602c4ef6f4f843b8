"""Input statistics: the rows are the layer's rows, and P is their inverse autocorrelation."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from networks import cnn, fnn, train
from reference.training import unfold
from rlsprune.statistics.rows import input_rows, sample_rows, split_matrix, weight_matrix

CONVS = [
    (nn.Conv2d(4, 6, 3, padding=1, stride=2), (4, 7, 9)),
    (nn.Conv2d(4, 6, (2, 3), padding="same", dilation=2), (4, 6, 7)),
    (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect", groups=2), (4, 6, 5)),
    (nn.Conv1d(4, 6, 3, padding=1, groups=4 // 2), (4, 9)),
    (nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVS, ids=lambda value: type(value).__name__)
def test_all_rows_are_the_explicit_patches(layer: Any, shape: tuple[int, ...]) -> None:
    images = torch.rand(3, *shape)
    rows, _ = sample_rows(layer, images, 10**6, torch.Generator())
    bare = copy.deepcopy(layer)
    bare.bias = None
    expected = unfold(bare, images)

    def in_order(matrix: torch.Tensor) -> list[list[float]]:
        return sorted(matrix.tolist())

    for group, other in zip(rows, expected, strict=True):
        assert in_order(group) == in_order(other)


def test_a_bounded_draw_gives_different_rows_and_leaves_the_global_state() -> None:
    layer = nn.Linear(3, 2)
    state = torch.get_rng_state()
    (rows,), _ = sample_rows(layer, torch.arange(3000.0).view(10, 100, 3), 128, torch.Generator().manual_seed(0))
    assert rows.shape == (128, 3)
    assert len(torch.unique(rows[:, 0])) == 128
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("layer", "shape"), [*CONVS, (nn.Linear(5, 4), (5,))], ids=lambda v: type(v).__name__)
def test_rows_times_weight_matrix_is_the_layer(layer: Any, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer).double()
    inputs = torch.rand(2, *shape).double()
    rows = nn.functional.pad(sample_rows(layer, inputs, 10**6, torch.Generator())[0], (0, 1), value=1.0)
    products = torch.cat(list((rows @ weight_matrix(layer)).detach()), 1)  # groups side by side: (rows, out)
    outputs = layer(inputs).detach().flatten(2).movedim(1, 2).flatten(0, 1) if inputs.dim() > 2 else layer(inputs)
    torch.testing.assert_close(products.sum(), outputs.detach().sum())
    torch.testing.assert_close(products.square().sum(), outputs.detach().square().sum())
    weight, bias = split_matrix(layer, weight_matrix(layer))
    assert torch.equal(weight, layer.weight)
    assert torch.equal(bias, layer.bias)


def test_rows_of_channels_in_a_grouped_convolution() -> None:
    layer = nn.Conv2d(6, 4, (1, 2), groups=2)
    rows = input_rows(layer, torch.tensor([[0, 3], [2, 5]]))
    assert rows.tolist() == [[[0, 1], [4, 5]], [[0, 1], [4, 5]]]


@pytest.mark.parametrize("make", [fnn, cnn])
def test_exact_p_is_the_inverse_autocorrelation_of_the_rows(make: Any) -> None:
    model = make().double()
    statistics = rlsprune.InputStatistics(model, damping=1e-4)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in statistics._collectors}
    for name in seen:
        model.get_submodule(name).register_forward_hook(lambda m, a, o, name=name: seen[name].append(a[0].detach()))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), (20,) if make is fnn else (3, 8, 8), steps=3)
    for name, batches in seen.items():
        layer = model.get_submodule(name)
        rows = unfold(layer, torch.cat(batches))[0]
        A = rows.T @ rows / len(rows)
        A += 1e-4 * A.diagonal().mean() * torch.eye(len(A))
        P = statistics.inverse(name)
        if isinstance(layer, nn.Linear):  # 96 rows: all of them
            torch.testing.assert_close(P, torch.linalg.inv(A), rtol=1e-6, atol=1e-6)
        else:  # a sample of patches
            assert torch.linalg.norm(torch.linalg.inv(P) - A) < 0.1 * torch.linalg.norm(A)


def test_mean_p_is_the_p_of_rls() -> None:
    model = cnn().double()
    optimizer = rlsprune.RLS(model, lr=0.1)
    statistics = rlsprune.InputStatistics(model, kind="training")
    train(model, optimizer, (3, 8, 8))
    for name in ("0", "3", "6", "8"):
        torch.testing.assert_close(statistics.inverse(name), optimizer.inverse(name))


def test_only_training_forwards_count_unless_everything_does() -> None:
    model = fnn()
    statistics = rlsprune.InputStatistics(model)
    with torch.no_grad():
        model(torch.rand(8, 20))
    model.eval()(torch.rand(8, 20))
    with pytest.raises(RuntimeError, match=r"no input of layer '0' was seen.*calibrate"):
        statistics.inverse("0")
    with statistics.everything(), torch.no_grad():
        model(torch.rand(8, 20))
    assert statistics.inverse("0").shape == (21, 21)
    with pytest.raises(KeyError, match="'9'; there are '0', '2', '4'"):
        statistics.inverse("9")


def test_the_sample_is_bounded_recent_and_repeatable() -> None:
    layer = nn.Linear(4, 2)
    samples = []
    for _ in range(2):
        statistics = rlsprune.InputStatistics(layer)
        statistics.clear(seed=3)
        for value in range(40):
            layer(torch.full((256, 4), float(value)) + torch.arange(256)[:, None] / 1000)
        batches = list(statistics._collectors[""]._batches)
        statistics.close()
        samples.append(torch.cat([rows[..., :4] for rows, _ in batches], 1))
    assert torch.equal(*samples)
    assert samples[0].shape[1] == 1024
    assert samples[0].min() >= 32  # the last eight batches
    assert not layer._forward_hooks


def test_statistics_do_not_keep_a_model_alive_and_copies_are_idle() -> None:
    model = fnn()
    statistics = rlsprune.InputStatistics(model)
    twin = copy.deepcopy(model)
    twin(torch.rand(8, 20))
    assert not statistics._collectors["0"]._batches
    dead = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert dead() is None
    finally:
        gc.enable()


def test_bad_arguments_and_bad_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="kind='best'"):
        rlsprune.InputStatistics(fnn(), kind="best")
    model = fnn()
    statistics = rlsprune.InputStatistics(model)
    model(torch.full((4, 20), float("inf")))
    with pytest.raises(FloatingPointError, match="input of layer '0' is not finite"):
        statistics.inverse("0")
