"""The input selector: same inputs, fewer features, and everything that torch does with a model still works."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from rlsprune.model.selector import full_in_features, kept_inputs, select_inputs, set_kept_inputs, strip_inputs


def narrow(layer: nn.Linear, kept: list[int]) -> None:
    select_inputs(layer, kept)
    layer.weight.data = layer.weight.data[:, kept]
    layer.in_features = len(kept)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))


def first(model: nn.Sequential) -> nn.Linear:
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    return layer


@pytest.fixture
def pruned() -> nn.Sequential:
    model = network()
    narrow(first(model), [0, 2, 3, 7, 11])
    return model


X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))


def test_selected_equals_the_full_network_with_the_dropped_features_zeroed(pruned: nn.Sequential) -> None:
    masked = torch.zeros(6, 12)
    masked[:, [0, 2, 3, 7, 11]] = X.flatten(1)[:, [0, 2, 3, 7, 11]]
    torch.testing.assert_close(pruned(X), network()(masked))


def test_selecting_again_composes_into_original_indices(pruned: nn.Sequential) -> None:
    layer = first(pruned)
    narrow(layer, [1, 3])
    kept = kept_inputs(layer)
    assert kept is not None
    assert kept.tolist() == [2, 7]
    assert kept.dtype == torch.int64
    assert full_in_features(layer) == 12
    assert len(layer._forward_pre_hooks) == 1
    weight = first(network()).weight[:, [2, 7]]
    torch.testing.assert_close(layer(X.flatten(1)), X.flatten(1)[:, [2, 7]] @ weight.T + layer.bias)


def test_keeping_all_installs_nothing() -> None:
    model = network()
    select_inputs(first(model), range(12))
    assert kept_inputs(first(model)) is None
    assert list(model.state_dict()) == list(network().state_dict())


def test_parameter_names_stay_and_one_buffer_comes(pruned: nn.Sequential) -> None:
    assert [name for name, _ in pruned.named_parameters()] == [name for name, _ in network().named_parameters()]
    assert set(pruned.state_dict()) - set(network().state_dict()) == {"1.kept_inputs"}


def test_forward_hooks_see_the_selected_input_whichever_came_first() -> None:
    model = network()
    seen: list[Tensor] = []
    first(model).register_forward_hook(lambda _, args, __: seen.append(args[0]))
    narrow(first(model), [1, 4])
    first(model).register_forward_hook(lambda _, args, __: seen.append(args[0]))
    model(X)
    assert len(seen) == 2
    for features in seen:
        assert torch.equal(features, X.flatten(1)[:, [1, 4]])


def test_kept_features_are_told_by_layer(pruned: nn.Sequential) -> None:
    assert rlsprune.kept_features(pruned) == {"1": [0, 2, 3, 7, 11]}
    assert rlsprune.kept_features(network()) == {}
    assert rlsprune.kept_features(strip_inputs(pruned)) == {}


def test_survives_pickle_deepcopy_and_half(pruned: nn.Sequential) -> None:
    expected = pruned(X)
    assert torch.equal(copy.deepcopy(pruned)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(pruned))(X), expected)
    wide = copy.deepcopy(pruned).double()
    torch.testing.assert_close(wide(X.double()).float(), expected)
    copied = kept_inputs(first(wide))
    assert copied is not None
    assert copied.data_ptr() != pruned.get_buffer("1.kept_inputs").data_ptr()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripts(pruned: nn.Sequential, tmp_path: Path) -> None:
    torch.jit.script(pruned).save(str(tmp_path / "scripted.pt"))
    scripted = torch.jit.load(str(tmp_path / "scripted.pt"))
    assert torch.equal(scripted(X), pruned(X))
    with pytest.raises(torch.jit.Error, match="5 of 12 input features"):
        scripted(X[:, :2])


def test_input_by_name_is_told_and_further_leading_dimensions_stay(pruned: nn.Sequential) -> None:
    layer = first(pruned)
    x = torch.randn(2, 4, 12)
    with pytest.raises(TypeError, match="as first argument"):
        layer(input=x)
    torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2]))


def test_compiles_in_one_graph(pruned: nn.Sequential) -> None:
    expected = pruned(X)
    torch.testing.assert_close(torch.compile(pruned, backend="aot_eager", fullgraph=True)(X), expected)


def test_trains_through_the_selector(pruned: nn.Sequential) -> None:
    pruned(X).square().sum().backward()
    assert first(pruned).weight.grad is not None
    assert first(pruned).weight.grad.shape == (5, 5)


def test_strip_takes_only_the_kept_features(pruned: nn.Sequential) -> None:
    stripped = strip_inputs(pruned)
    assert torch.equal(stripped(X.flatten(1)[:, [0, 2, 3, 7, 11]]), pruned(X))
    assert list(stripped.state_dict()) == list(network().state_dict())
    assert kept_inputs(first(pruned)) is not None
    assert stripped.get_parameter("1.weight").data_ptr() != pruned.get_parameter("1.weight").data_ptr()
    with pytest.raises(RuntimeError):
        stripped(X)


def test_wrong_width_names_both_sizes(pruned: nn.Sequential) -> None:
    with pytest.raises(ValueError, match=r"5 of 12 input features.*must have 12 features, not 5.*strip_inputs"):
        first(pruned)(torch.randn(2, 5))


def test_removing_the_selector_restores_the_layer(pruned: nn.Sequential) -> None:
    layer = first(pruned)
    set_kept_inputs(layer, None)
    assert vars(layer).keys() == vars(nn.Linear(5, 5)).keys()
    assert layer(torch.randn(2, 5)).shape == (2, 5)
    set_kept_inputs(layer, None)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "at least one"),
        ([0, 12], "0…11"),
        ([-1, 3], "0…11"),
        ([3, 1], "ascending"),
        ([3, 3], "ascending"),
        ([[1, 2]], r"\(1, 2\)"),
        ([0.5], "integer"),
        (torch.ones(12, dtype=torch.bool), "integer"),
    ],
)
def test_bad_indices_are_refused_and_change_nothing(kept: list[int], message: str) -> None:
    layer = nn.Linear(12, 5)
    with pytest.raises(ValueError, match=message):
        select_inputs(layer, kept)
    assert kept_inputs(layer) is None
    assert not layer._forward_pre_hooks


def test_a_name_already_taken_is_refused() -> None:
    layer = nn.Linear(3, 2)
    layer.register_buffer("kept_inputs", torch.zeros(1))
    with pytest.raises(ValueError, match="rename"):
        select_inputs(layer, [0])
