"""Costs against counts by hand, and no trace left in the model."""

from __future__ import annotations

import copy
import statistics
import threading

import pytest
import torch
from torch import Tensor, nn

from rlsprune.model.cost import Profile, profile
from rlsprune.model.counts import count, parameter_count, weight_count
from rlsprune.model.latency import latency
from rlsprune.model.selector import select_inputs


def fnn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )


def test_counts_of_an_fnn() -> None:
    assert count(fnn(), torch.randn(7, 20)) == (20 * 16 + 16 + 16 * 4 + 4, 2 * 7 * (20 * 16 + 16 * 4))
    assert weight_count(fnn()) == 20 * 16 + 16 * 4


def test_counts_of_a_grouped_conv_net() -> None:
    weights = [8 * 3 * 9, 8 * 2 * 9, 5 * 128]
    uses = [6 * 6, 4 * 4, 1]  # output positions at which each weight is used
    params, flops = count(conv_net(), torch.randn(2, 3, 6, 6))
    assert flops == sum(2 * 2 * weight * use for weight, use in zip(weights, uses, strict=True))
    assert params == sum(weights) + 8 + 2 * 8 + 5
    assert weight_count(conv_net()) == sum(weights)


def test_flops_follow_the_batch_given() -> None:
    assert count(fnn(), torch.randn(10, 20))[1] == 10 * count(fnn(), torch.randn(1, 20))[1]


def test_attention_is_counted_although_its_inference_is_fused() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    tokens = 2 * 5
    projections = tokens * (4 * 16 * 16 + 2 * 16 * 32)
    products = 2 * 2 * 5 * 5 * 16  # batch · (scores, mixture) · tokens² · width
    assert count(layer, torch.randn(2, 5, 16))[1] == 2 * (projections + products)
    assert weight_count(layer) == 4 * 16 * 16 + 2 * 16 * 32


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    assert parameter_count(model) == 36 + 12
    assert weight_count(model) == 36


def test_arguments_by_position_and_by_name() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            out: Tensor = self.a(left) + self.b(right)
            return out

    left, right = torch.randn(5, 3), torch.randn(5, 4)
    assert count(Sum(), (left, right)) == count(Sum(), {"right": right, "left": left}) == (18, 2 * 5 * 14)
    with pytest.raises(TypeError, match="example_inputs is a str"):
        count(Sum(), "left")  # type: ignore[arg-type]


def test_peak_of_a_chain_is_its_model_and_its_two_largest_neighbours() -> None:
    model = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 200), nn.Linear(200, 1))
    model_bytes = 4 * parameter_count(model)
    assert profile(model, torch.randn(8, 10), min_seconds=0.01).peak_bytes == model_bytes + 4 * 8 * (100 + 200)


def test_peak_counts_what_is_kept_and_not_views() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = [x + 1, x + 2, x + 3]
            out: Tensor = kept[0].view(-1).view_as(x) + kept[1]
            return out

    assert profile(Keeps(), torch.randn(50, 2), min_seconds=0.01).peak_bytes == 4 * 100 * 4


def test_nothing_of_the_model_or_the_generator_changes() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.norm(x) + torch.randn_like(x)
            return out

    model = nn.Sequential(Noisy(), nn.Dropout())
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.randn(5)
    torch.manual_seed(3)
    profile(model, torch.randn(3, 4, generator=torch.Generator()), min_seconds=0.01)
    assert torch.equal(torch.randn(5), expected)
    assert [module.training for module in model.modules()] == modes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_training_hooks_do_not_run_and_the_selector_does() -> None:
    model = fnn()
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    calls: list[int] = []

    def watch(*_: object) -> None:
        calls.append(1)

    watch.__module__ = "rlsprune.optim.recorder"
    layer.register_forward_hook(watch)
    select_inputs(layer, range(10))
    layer.weight.data, layer.in_features = layer.weight.data[:, :10], 10
    assert count(model, torch.randn(1, 20))[1] == 2 * (160 + 64)
    assert not calls
    assert len(layer._forward_hooks) == 1


def test_latency_has_an_iqr_even_when_time_is_short() -> None:
    median, iqr = latency(fnn(), torch.randn(4, 20), min_seconds=1e-6)
    assert median > 0
    assert iqr >= 0


def costs(params: int = 10, before: Profile | None = None) -> Profile:
    return Profile(params, 8, 400, 2.0, 0.1, 1000, before)


def test_ratio_and_table() -> None:
    old, new = costs(1000), Profile(250, 2, 100, 0.5, 0.1, 500)
    ratio = old / new
    assert (ratio.params, ratio.weights, ratio.flops, ratio.latency, ratio.peak) == (4, 4, 4, 4, 2)
    lines = str(ratio).splitlines()
    assert lines[0].split() == ["before", "after", "before", "/", "after"]
    assert lines[1].split() == ["parameters", "1,000", "250", "4.00×"]
    assert str(Profile(250, 2, 100, 0.5, 0.1, 500, before=old)) == str(ratio)
    assert str(old).splitlines()[1].split() == ["parameters", "1,000"]
    assert (costs(0) / costs(0)).params == 1
    assert (costs(1) / costs(0)).params == float("inf")


def test_an_earlier_profile_is_shown_and_nothing_else_is_taken_for_one() -> None:
    assert profile(fnn(), torch.randn(1, 20), before=costs(), min_seconds=0.01).before == costs()
    with pytest.raises(TypeError, match="before is a int: give the model as it was, that model and its inputs"):
        profile(fnn(), torch.randn(1, 20), before=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        costs() / 2  # type: ignore[operator]


def test_two_models_are_measured_in_turns_and_the_ratio_has_quartiles() -> None:
    whole, small = nn.Linear(400, 400), nn.Linear(400, 20)
    costs = profile(small, torch.randn(64, 400), before=whole, min_seconds=0.01)
    assert costs.before is not None
    assert costs.before.params == 400 * 401
    ratio = costs.before / costs
    assert len(costs.before.rounds_ms) == len(costs.rounds_ms) >= 5
    low, high = ratio.latency_quartiles
    ratios = sorted(b / a for b, a in zip(costs.before.rounds_ms, costs.rounds_ms, strict=True))
    assert ratios[0] <= low <= high <= ratios[-1]
    assert f"{ratio.latency:.2f}× ({low:.2f}–{high:.2f})" in str(costs)
    assert ratio.latency == pytest.approx(statistics.median(ratios)), "a load that comes and goes slows both alike"
    alone = profile(small, torch.randn(64, 400), min_seconds=0.01)
    assert (costs.before / alone).latency_quartiles is None, "they were not measured in turns"


def test_a_stripped_model_is_measured_in_turns_with_one_that_takes_all_inputs() -> None:
    whole, small, x = nn.Linear(400, 400), nn.Linear(20, 20), torch.randn(64, 400)
    costs = profile(small, x[:, :20], before=(whole, x), min_seconds=0.01)
    assert costs.before is not None
    assert costs.before.flops == 2 * 64 * 400 * 400
    assert costs.flops == 2 * 64 * 20 * 20
    assert (costs.before / costs).latency_quartiles is not None


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.recurrent = kind(16, 32, batch_first=True, **options)
        self.head = nn.Linear(32 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0][:, -1])


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_recurrent_layers_and_embeddings_are_counted(
    kind: type[nn.Module], gates: int, layers: int, bidirectional: bool
) -> None:
    """Each gate multiplies the input and the last state by a matrix, at every step and in every direction."""
    batch, steps, ways = 2, 7, 2 if bidirectional else 1
    model = Recurrent(kind, num_layers=layers, bidirectional=bidirectional)
    widths = [16, *[32 * ways] * (layers - 1)]
    weights = sum(ways * gates * 32 * (width + 32) for width in widths)
    assert count(model, torch.randint(50, (batch, steps)))[1] == 2 * batch * (steps * weights + 32 * ways * 3)
    assert weight_count(model) == weights + 50 * 16 + 32 * ways * 3


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"cannot run on example_inputs of shape \(2, 3\): RuntimeError: mat1"):
        profile(nn.Linear(5, 4), torch.randn(2, 3))


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    model[0].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"lock \(lock\) of module '0' cannot be copied \(TypeError: cannot pickle"):
        profile(model, torch.randn(2, 5))


def test_activations_that_a_module_keeps_in_a_dict_are_no_obstacle() -> None:
    model = nn.Linear(5, 4)
    model.cache = {"last": model(torch.randn(2, 5)), "parts": [model.weight * 2]}
    assert profile(model, torch.randn(2, 5), min_seconds=0).params == 24


def test_a_module_that_is_called_with_a_view_of_a_parameter() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(self.token.expand(len(x), -1))

    model = Token()
    assert count(model, torch.randn(3, 2)) == (14, 2 * 3 * 4 * 2)
    assert all(parameter.requires_grad for parameter in model.parameters())
