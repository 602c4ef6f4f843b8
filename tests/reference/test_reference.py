"""Facts about the reference itself: if these fail, agreement with it means nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from .pruning import Gate, State, choose, cut, install, prune, refit, remove, schur_inverse, snapshot
from .training import ReferenceRLS, closed_form_ridge, paper_loss, patches, to_paper, to_torch, unfold


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive_definite(n: int) -> Tensor:
    X = randn(3 * n, n)
    return X.T @ X


def fnn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 7),
        nn.ReLU(),
        nn.Linear(7, 2),
    ).double()


CONVOLUTIONS = [
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), bias=False),
    nn.Conv2d(4, 6, 3, dilation=(2, 1), padding=2, groups=2),
    nn.Conv2d(4, 8, 3, padding=1, groups=4, padding_mode="circular"),
    nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)),
    nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"),
    nn.Conv2d(4, 6, 2, padding="valid", stride=2, padding_mode="replicate"),
    nn.Conv1d(4, 6, 3, stride=2, padding=1),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolution_is_unfolded_rows_times_weights(layer: nn.Conv1d | nn.Conv2d) -> None:
    layer = layer.double()
    inputs = randn(3, 4, *(9, 8)[: len(layer.kernel_size)])
    expected = layer(inputs)
    matrices = to_paper(layer, layer.weight, layer.bias)
    outputs = torch.cat(list(unfold(layer, inputs) @ matrices), dim=1)  # groups give neighbouring channels
    positions = len(patches(layer, inputs))
    assert torch.allclose(outputs.reshape(positions, 3, -1).permute(1, 2, 0), expected.flatten(2), atol=1e-12)


@pytest.mark.parametrize("layer", [*CONVOLUTIONS, nn.Linear(4, 3), nn.Linear(4, 3, bias=False)], ids=str)
def test_layouts_round_trip(layer: nn.Linear | nn.Conv2d) -> None:
    weight, bias = to_torch(layer, to_paper(layer, layer.weight, layer.bias))
    assert torch.equal(weight, layer.weight)
    assert (bias is None and layer.bias is None) or torch.equal(bias, layer.bias)


@pytest.mark.parametrize("forgetting", [1.0, 0.97])
@pytest.mark.parametrize("p0", [1.0, 20.0])
def test_one_linear_layer_is_ridge_regression(forgetting: float, p0: float) -> None:
    layer = nn.Linear(5, 2).double()
    start = layer.weight.detach().clone(), layer.bias.detach().clone()
    X, Y = randn(60, 5), randn(60, 2)
    reference = ReferenceRLS(layer, lr=1.0, momentum=0.0, forgetting=forgetting, mean_scale=1.0, p0=p0)
    for x, y in zip(X, Y, strict=True):
        reference.step(x.reshape(1, -1), y.reshape(1, -1), paper_loss)
    ridge = closed_form_ridge(X, Y, p0, forgetting, start)
    assert torch.allclose(layer.weight, ridge.weight, atol=1e-9)
    assert torch.allclose(layer.bias, ridge.bias, atol=1e-9)
    assert torch.allclose(reference.P[""], ridge.P, atol=1e-9)


def test_closed_form_is_the_textbook_formula() -> None:
    X, Y, p0 = randn(30, 4), randn(30, 3), 2.0
    Z = torch.cat([X, torch.ones(30, 1, dtype=torch.float64)], dim=1)
    W = torch.linalg.inv(torch.eye(5, dtype=torch.float64) / p0 + Z.T @ Z) @ Z.T @ Y
    ridge = closed_form_ridge(X, Y, p0)
    assert torch.allclose(torch.cat([ridge.weight.T, ridge.bias.reshape(1, -1)]), W)


def test_sherman_morrison_on_every_layer_of_a_network() -> None:
    """P is the inverse of A_t = λ A_{t-1} + k x xᵀ, for each group of each layer."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, stride=2),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
    ).double()
    forgetting, mean_scale, p0 = 0.98, 0.3, 0.5
    reference = ReferenceRLS(model, 0.5, forgetting=forgetting, mean_scale=mean_scale, p0=p0)
    A = {name: torch.linalg.inv(P) for name, P in reference.P.items()}
    for _ in range(20):
        reference.step(randn(4, 2, 6, 6), randn(4, 3), paper_loss)
        for name, x in reference.mean_input.items():
            outer = torch.stack([torch.outer(row, row) for row in x])
            A[name] = forgetting * A[name] + mean_scale * outer.reshape(A[name].shape)
    assert reference.P["2"].shape == (2, 19, 19)
    for name, P in reference.P.items():
        assert torch.allclose(P @ A[name], torch.eye(P.shape[-1], dtype=torch.float64), atol=1e-9)


def test_without_statistics_rls_is_momentum_sgd() -> None:
    """k → 0 leaves P at p0·I and h at 1: equations (21) and (22) are then SGD with momentum and rate η·p0."""
    model, twin = fnn(), fnn()
    twin.load_state_dict(model.state_dict())
    reference = ReferenceRLS(model, lr=0.2, momentum=0.5, mean_scale=0.0, p0=0.5)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    for _ in range(5):
        X, Y = randn(6, 12), randn(6, 3)
        reference.step(X, Y, paper_loss)
        sgd.zero_grad()
        paper_loss(twin(X), Y).backward()
        sgd.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-13)


def test_layer_rates_and_weight_decay() -> None:
    model = fnn()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    reference = ReferenceRLS(model, lr={"0": 0.0, "2": 0.1, "4": 0.0}, momentum=0.0, weight_decay=0.5)
    reference.step(randn(4, 12), randn(4, 3), lambda outputs, _: 0 * outputs.sum())
    for parameter, old, factor in zip(model.parameters(), before, [1, 1, 0.95, 0.95, 1, 1], strict=True):
        assert torch.allclose(parameter, factor * old)


def test_a_layer_called_twice_has_the_rows_of_both_calls() -> None:
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, layer)
    X = randn(5, 2, 3)
    both = torch.cat([X.reshape(-1, 3), layer(X).detach().reshape(-1, 3)])
    reference = ReferenceRLS(model)
    reference.step(X, randn(5, 2, 3), paper_loss)
    assert torch.allclose(reference.mean_input["0"][0, :3], both.mean(dim=0))
    assert reference.mean_input["0"][0, 3] == pytest.approx(1)


@pytest.mark.parametrize(
    ("model", "message"),
    [(nn.Linear(2, 2), "float64"), (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double(), "belongs to no")],
)
def test_models_outside_the_reference_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReferenceRLS(model)


def test_cut_is_the_floor_of_the_real_product() -> None:
    assert [cut(0.3, 10), cut(0.29, 100), cut(0.57, 100), cut(0.4, 4), cut(1 / 3, 3)] == [3, 29, 57, 1, 1]
    inputs = 784
    for _ in range(5):
        inputs -= cut(0.2, inputs)
    assert inputs / 784 == pytest.approx(0.330, abs=5e-4)  # Table 1


def test_choice_is_the_intersection_and_ties_go_to_the_lower_index() -> None:
    chain = [("fc", "a"), ("fc", "b")]
    norms = torch.tensor([1.0, 5.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    # Row sums without the bias: 2, 2, 1, 2, 2. The bias's own row and column are huge and must not matter.
    P = torch.diag(torch.tensor([2.0, 2.0, 1.0, 2.0, 2.0, 9.0], dtype=torch.float64))
    P[5, 2] = P[2, 5] = 100.0
    state = State(
        {"a": norms.reshape(5, 1), "b": randn(2, 5)},
        {"a": 100 * randn(5), "b": randn(2)},
        {"a": torch.eye(2, dtype=torch.float64), "b": P},
    )
    # ξ = 0.6 takes three: by P 0, 1, 3; by W 0, 2, 3.
    assert choose(state, chain, 1, 0.6) == [0, 3]
    assert choose(state, chain, 1, 0.6, min_channels=4) == [0]
    assert choose(state, chain, 1, 0.6, min_channels=9) == []
    # ξ = 0.4 takes two: by P 0, 1; by W 0, 2.
    assert choose(state, chain, 1, 0.4) == [0]


def test_row_sums_keep_their_sign() -> None:
    P = torch.tensor([[5.0, -4.9, 0.0], [-4.9, 5.0, 0.0], [0.0, 0.0, 0.2]], dtype=torch.float64)
    state = State({"a": randn(2, 3)}, {"a": None}, {"a": P})
    assert choose(state, [("fc", "a")], 0, 0.4, input_ratio=0.34) == [2]
    assert choose(state, [("fc", "a")], 0, 0.68) == [2]


def test_a_channel_behind_a_flatten_goes_by_any_node_or_as_one() -> None:
    chain = [("conv", "a"), ("fc", "b")]
    norms = torch.tensor([1.0, 2.0, 8.0, 9.0], dtype=torch.float64)
    # Two nodes a channel. Channel 0 has the largest single row sum, channel 1 the larger total.
    sums = torch.tensor([9.0, -9.0, 5.0, 6.0, 7.0, 8.0, 1.0, 1.0], dtype=torch.float64)
    state = State(
        {"a": norms.reshape(4, 1, 1, 1), "b": randn(2, 8)},
        {"a": None, "b": None},
        {"a": torch.eye(1, dtype=torch.float64), "b": torch.diag(sums)},
    )
    # ξ = 0.5: nodes by P 0, 5, 4, 3 and by W 0, 1, 2, 3, so nodes 0 and 3, of channels 0 and 1.
    assert choose(state, chain, 1, 0.5, criterion="rls-paper") == [0, 1]
    assert choose(state, chain, 1, 0.5, criterion="rls-paper", min_channels=3) == [0]
    # Channels by P 2, 1 and by W 0, 1.
    assert choose(state, chain, 1, 0.5, criterion="rls") == [1]
    assert choose(state, chain, 0, 0.5) == []  # the colours of an image


@pytest.mark.parametrize("n", [4, 9])
def test_schur_and_refit_are_the_optimal_brain_surgeon(n: int) -> None:
    P, W = torch.linalg.inv(positive_definite(n)), randn(n, 3)
    kept, gone = [0, *range(2, n)], [1]
    solved = torch.linalg.solve(P[gone][:, gone], torch.cat([P[gone][:, kept], W[gone]], dim=1))
    schur = P[kept][:, kept] - P[kept][:, gone] @ solved[:, : n - 1]
    assert torch.allclose(schur_inverse(P, kept), schur, atol=1e-12)
    assert torch.allclose(refit(W, P, kept), W[kept] - P[kept][:, gone] @ solved[:, n - 1 :], atol=1e-10)


def test_refit_is_least_squares_on_the_data() -> None:
    X, W, kept = randn(50, 6), randn(6, 2), [0, 2, 5]
    best = torch.linalg.lstsq(X[:, kept], X @ W).solution
    assert torch.allclose(refit(W, torch.linalg.inv(X.T @ X), kept), best, atol=1e-10)


def trained(model: nn.Sequential, *shape: int) -> ReferenceRLS:
    reference = ReferenceRLS(model, lr=0.1)
    for _ in range(5):
        reference.step(randn(8, *shape).relu(), randn(8, model[-1].out_features), paper_loss)
    return reference


@pytest.mark.parametrize("inverse", ["slice", "schur"])
def test_a_pruned_fnn_is_the_old_one_with_zeros_and_trains_on(inverse: str) -> None:
    reference = trained(fnn(), 12)
    state, chain = snapshot(reference)
    removed = {"0": [1, 4], "2": [0, 9], "4": [3]}
    for position, (_, name) in enumerate(chain):
        remove(state, chain, position, removed[name], inverse=inverse)
        with torch.no_grad():
            reference.model[int(name)].weight[:, removed[name]] = 0
    X = randn(6, 12)
    expected = reference.model(X)
    install(state, reference)
    assert state.kept_inputs == [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert torch.allclose(reference.model(X[:, state.kept_inputs]), expected, atol=1e-12)
    assert [tuple(reference.P[name].shape) for name in ("0", "2", "4")] == [(11, 11), (9, 9), (8, 8)]
    before = [parameter.detach().clone() for parameter in reference.model.parameters()]
    reference.step(X[:, state.kept_inputs].relu(), randn(6, 3), paper_loss)
    for old, new in zip(before, reference.model.parameters(), strict=True):
        assert not torch.equal(old, new)


@pytest.mark.parametrize("criterion", ["rls", "rls-paper"])
def test_a_pruned_cnn_is_the_old_one_with_zeros(criterion: str) -> None:
    reference = trained(cnn(), 3, 6, 6)
    state, chain = snapshot(reference)
    removed = prune(state, chain, 0.7, criterion=criterion)
    assert removed["0"] == []
    assert removed["3"]
    assert removed["6"]
    with torch.no_grad():
        reference.model[3].weight[:, removed["3"]] = 0
        reference.model[6].weight.reshape(7, 8, 9)[:, removed["6"]] = 0
        reference.model[8].weight[:, removed["8"]] = 0
    X = randn(4, 3, 6, 6)
    expected = reference.model(X)
    install(state, reference)
    assert state.kept_inputs is None
    assert torch.allclose(reference.model(X), expected, atol=1e-12)
    assert reference.model[8].out_features == 2


def test_dead_inputs_can_go_without_a_trace_in_training() -> None:
    """An input that is always zero moves nothing, so training with and without it is the same."""
    model, X, Y = fnn(), randn(4, 6, 12), randn(4, 6, 3)
    X[..., [2, 7]] = 0
    reference = ReferenceRLS(model, lr=0.1)
    for x, y in zip(X[:2], Y[:2], strict=True):
        reference.step(x, y, paper_loss)
    twin = fnn()
    twin.load_state_dict(model.state_dict())
    pruned = ReferenceRLS(twin, lr=0.1)
    state, chain = snapshot(reference)
    remove(state, chain, 0, [2, 7], inverse="schur")
    install(state, pruned)
    for x, y in zip(X[2:], Y[2:], strict=True):
        reference.step(x, y, paper_loss)
        pruned.step(x[:, state.kept_inputs], y, paper_loss)
    assert torch.allclose(twin[0].weight, model[0].weight[:, state.kept_inputs], atol=1e-12)
    assert torch.allclose(twin[4].weight, model[4].weight, atol=1e-12)


def test_a_layer_is_scored_after_the_one_before_was_pruned() -> None:
    """Dropping the input that carries node 0's norm makes node 0 the weakest, but only after that prune."""
    chain = [("fc", "a"), ("fc", "b")]
    a = torch.tensor([[1.0, 9.0], [2.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    P_a, P_b = torch.diag(torch.tensor([1.0, 2.0])).double(), torch.diag(torch.tensor([2.0, 1.0, 1.0])).double()
    state = State({"a": a, "b": randn(1, 3)}, {"a": None, "b": None}, {"a": P_a, "b": P_b})
    assert choose(state, chain, 1, 0.4) == []
    assert prune(state, chain, 0.4, input_ratio=0.5) == {"a": [1], "b": [0]}
    assert {name: tuple(weight.shape) for name, weight in state.weights.items()} == {"a": (2, 1), "b": (1, 2)}


def test_compensation_refits_each_consumer_with_its_bias() -> None:
    """With P from the layer's own input rows, the refit output is the best any kept inputs can give."""
    X = torch.cat([randn(40, 5), torch.ones(40, 1, dtype=torch.float64)], dim=1)
    W = randn(6, 2)
    state = State({"a": W[:5].T}, {"a": W[5]}, {"a": torch.eye(6, dtype=torch.float64)})
    remove(state, [("fc", "a")], 0, [1, 3], compensate=True, statistics={"a": torch.linalg.inv(X.T @ X)})
    kept = [0, 2, 4, 5]
    best = X[:, kept] @ torch.linalg.lstsq(X[:, kept], X @ W).solution
    assert state.biases["a"] is not None
    assert torch.allclose(X[:, kept[:3]] @ state.weights["a"].T + state.biases["a"], best, atol=1e-10)
    assert torch.equal(state.P["a"], torch.eye(4, dtype=torch.float64))


def test_gate_follows_algorithm_1() -> None:
    gate = Gate(warmup_epochs=2)
    losses = [0.1, 0.1, 0.9, 0.9, 0.8, 0.85, math.inf, 0.7]
    assert [gate.step(loss) for loss in losses] == [False, False, True, False, True, False, False, True]
    assert gate.recorded == 0.7
