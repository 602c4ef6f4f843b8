"""A trained network goes in, the smallest that is good enough comes out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rlsprune
from rlsprune.model.counts import count, parameter_count
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.shrinking import FrontPoint
from rlsprune.shrinking.closed_form import ClosedForm
from rlsprune.training.batches import GivenBatches
from rlsprune.training.loop import evaluate

Batches = Sequence[tuple[Tensor, Tensor]]


def batches(seed: int, count: int = 16) -> Batches:
    """Points in a plane (and six features of noise), of which two classes lie inside and outside a circle."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 64, 8, generator=generator) * 2 - 1
    return [(x, (x[:, :2].square().sum(1) > 0.6).long()) for x in inputs]


def inputs_of(pairs: Batches) -> list[Tensor]:
    return [inputs for inputs, _ in pairs]


def train(model: nn.Sequential) -> nn.Sequential:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        for inputs, labels in batches(0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def original() -> nn.Module:
    torch.manual_seed(0)
    return train(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))


@pytest.fixture
def trained(original: nn.Module) -> nn.Module:
    return copy.deepcopy(original)


def accuracy(model: nn.Module) -> float:
    return evaluate(model, batches(1), nn.functional.cross_entropy).accuracy


# --- at once, without training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["params", "flops"])
def test_the_target_is_reached_at_once_from_inputs_alone(trained: nn.Module, what: str) -> None:
    before = accuracy(trained)
    parameters = list(trained.parameters())
    shrunk = rlsprune.shrink(trained, inputs_of(batches(0)), target={what: 0.3})
    first, last = shrunk.front
    # Just below the target: one more unit of some layer would be above it.
    assert 0.27 < getattr(last, what) / getattr(first, what) <= 0.3
    assert (last.params, last.flops) == count(trained, torch.rand(1, 8))
    assert shrunk.model is trained
    assert shrunk.chosen is last
    assert all(one is other for one, other in zip(parameters, trained.parameters(), strict=True))
    assert accuracy(trained) > before - 3
    assert (first.score, last.epochs) == (100.0, 0), "the given network agrees with itself"
    assert not trained.training
    assert str(shrunk).splitlines()[-1].endswith("this one")
    assert not any(layer._forward_hooks for layer in trained.modules())


def test_a_cut_without_the_refit_is_far_worse(trained: nn.Module) -> None:
    inputs = inputs_of(batches(0))
    form = ClosedForm(trained, inputs[0][:1], Calibration(inputs, [64] * 16), ignore=["input"])
    plan = form.plan({"params": 0.06})
    form.cut(plan)
    cut = accuracy(trained)
    form.apply(plan)
    assert accuracy(trained) > cut + 3
    form.restore()
    assert parameter_count(trained) == sum(p.numel() for p in form.whole.parameters())


def test_the_score_of_labelled_batches_is_accuracy(trained: nn.Module) -> None:
    before = accuracy(trained)
    shrunk = rlsprune.shrink(trained, batches(0), target={"params": 0.4}, valid=batches(1))
    assert shrunk.front[0].score == before
    assert shrunk.chosen.score == accuracy(trained)


def test_the_smallest_network_within_the_drop_is_found_by_few_trials(trained: nn.Module) -> None:
    before = accuracy(trained)
    seen: list[FrontPoint] = []
    shrunk = rlsprune.shrink(
        trained, batches(0), max_drop=2.0, valid=batches(1), on_point=lambda point, model: seen.append(point)
    )
    assert tuple(seen) == shrunk.front
    assert len(seen) <= 8
    within = [point for point in seen if point.within]
    assert shrunk.chosen is min(within, key=lambda point: point.flops)
    assert shrunk.chosen.score == accuracy(trained) >= before - 2.0
    beyond = max(point.flops for point in seen if not point.within)
    assert beyond < shrunk.chosen.flops < 0.5 * seen[0].flops
    assert parameter_count(trained) == shrunk.chosen.params


@pytest.mark.parametrize("what", ["params", "flops", "latency"])
def test_the_drop_limits_whatever_is_to_be_made_small(trained: nn.Module, what: str) -> None:
    before = accuracy(trained)
    shrunk = rlsprune.shrink(trained, batches(0), target=what, max_drop=2.0, valid=batches(1))
    assert shrunk.chosen.score == accuracy(trained) >= before - 2.0
    assert any(not point.within for point in shrunk.front)
    assert shrunk.chosen.params < 0.5 * shrunk.front[0].params


def test_a_target_within_the_drop_is_where_it_ends(trained: nn.Module) -> None:
    shrunk = rlsprune.shrink(trained, batches(0), max_drop=5.0, target={"params": 0.6}, valid=batches(1))
    assert len(shrunk.front) == 2
    assert 0.5 < shrunk.chosen.params / shrunk.front[0].params <= 0.6


def test_a_latency_target_is_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).eval()
    inputs = torch.rand(4, 64, 64)
    whole = parameter_count(model)
    told: list[str] = []
    rlsprune.shrink(model, inputs, target={"latency": 0.5}, on_progress=lambda stage, done, total: told.append(stage))
    assert parameter_count(model) < whole
    assert told.count("measuring latency") == 6


def test_widths_follow_the_resource_that_was_asked_for() -> None:
    # The first layer has few weights and works at many places, the last one many weights at one place.
    torch.manual_seed(0)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4),
        ).eval()  # fmt: skip

    inputs = torch.randn(8, 32, 3, 12, 12)
    params, flops = made(), made()
    rlsprune.shrink(params, inputs, target={"params": 0.4})
    rlsprune.shrink(flops, inputs, target={"flops": 0.4})
    assert params[6].out_features < flops[6].out_features
    assert params[0].out_channels > flops[0].out_channels


def test_layers_that_can_spare_it_are_cut_more() -> None:
    # The second hidden layer has sixteen units, each four times.
    torch.manual_seed(0)
    model = train(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)))
    wide = nn.Linear(64, 64), nn.Linear(64, 2)
    with torch.no_grad():
        for copied, (layer, dim) in zip(wide, ((model[2], 0), (model[4], 1)), strict=True):
            copied.weight.copy_(layer.weight.repeat_interleave(4, dim) / (4 if dim else 1))
            copied.bias.copy_(layer.bias if dim else layer.bias.repeat_interleave(4))
    model[2], model[4] = wide
    before = accuracy(model)
    rlsprune.shrink(model, inputs_of(batches(0)), target={"params": 0.5}, ignore=["input"])
    assert model[2].out_features < 0.5 * model[0].out_features
    assert accuracy(model) >= before - 0.5


def test_layers_keep_what_they_must(trained: nn.Module) -> None:
    rlsprune.shrink(trained, batches(0), target={"params": 0.3}, ignore=["2", "input"], min_channels=8, round_to=8)
    assert trained[2].out_features == 64
    assert trained[0].in_features == 8
    assert 8 <= trained[0].out_features < 64
    assert trained[0].out_features % 8 == 0


# --- what batches may look like ---------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 24), nn.Linear(3, 24), nn.Linear(24, 2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"value": self.head(torch.relu(self.left(left) + self.right(right)))}


def test_several_inputs_as_tuples_and_as_dicts() -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    pairs = [(torch.randn(32, 5), torch.randn(32, 3)) for _ in range(6)]
    by_tuple, by_name, by_label = (copy.deepcopy(model) for _ in range(3))
    rlsprune.shrink(by_tuple, [(pair, None) for pair in pairs], target={"params": 0.5})
    rlsprune.shrink(by_name, [{"left": left, "right": right} for left, right in pairs], target={"params": 0.5})
    labelled = [{"left": left, "right": right, "labels": left[:, :2]} for left, right in pairs]
    shrunk = rlsprune.shrink(by_label, labelled, target={"params": 0.5})
    for other in (by_name, by_label):
        for one, two in zip(by_tuple.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two)
    assert parameter_count(by_tuple) <= 0.5 * parameter_count(model)
    # Targets that are no classes: minus the mean squared error.
    errors = [(model(*pair)["value"] - pair[0][:, :2]).square().mean() for pair in pairs]
    assert shrunk.front[0].score == pytest.approx(-float(torch.stack(errors).mean().detach()), rel=1e-4)


def test_a_data_loader_of_inputs(trained: nn.Module) -> None:
    inputs = torch.cat(inputs_of(batches(0)))
    loader = DataLoader(TensorDataset(inputs), batch_size=100, shuffle=True)
    shrunk = rlsprune.shrink(trained, loader, target={"params": 0.5}, calibration=500)
    assert shrunk.chosen.params <= 0.5 * shrunk.front[0].params


def test_agreement_is_counted_on_the_same_inputs_whatever_their_order(trained: nn.Module) -> None:
    given = copy.deepcopy(trained)
    inputs = torch.cat(inputs_of(batches(1)))
    shuffled = DataLoader(TensorDataset(inputs), batch_size=100, shuffle=True)
    shrunk = rlsprune.shrink(trained, inputs_of(batches(0)), target={"params": 0.1}, valid=shuffled)
    agreement = (trained(inputs).argmax(1) == given(inputs).argmax(1)).float().mean()
    assert shrunk.chosen.score == pytest.approx(100 * float(agreement))
    assert shrunk.chosen.score < 99


def test_outputs_that_are_no_class_scores_are_compared_by_their_variance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 16))
    with torch.no_grad():
        model[2].weight.mul_(0.1)
    given = copy.deepcopy(model)
    inputs = torch.randn(4, 64, 8)
    shrunk = rlsprune.shrink(model, list(inputs), target={"params": 0.5})
    flat = inputs.flatten(0, 1)
    apart = [(model(x) - given(x)).square().mean() / given(x).var(correction=0) for x in inputs]
    assert shrunk.chosen.score == pytest.approx(-float(torch.stack(apart).mean().detach()), rel=1e-3)
    assert shrunk.front[0].score == 0
    assert torch.isfinite(model(flat)).all()


@pytest.mark.parametrize("count", [1, 7, 100, 640, 1000])
def test_a_sample_is_spread_evenly_over_the_batches(count: int) -> None:
    everything = torch.arange(640)
    given = [(part.unsqueeze(1), part) for part in everything.split(60)]
    sample = GivenBatches(given, torch.device("cpu"), "valid").sample(count).pairs
    labels = torch.cat([labels for _, labels in sample])
    assert count / 2 <= len(labels) <= count or len(labels) == 640
    assert labels.diff().unique().numel() <= 1
    assert 640 - labels[-1] <= 640 / len(labels)
    assert all(torch.equal(inputs[:, 0], labels) and len(labels) <= 60 for inputs, labels in sample)  # type: ignore[call-overload]


def test_batches_that_cannot_be_joined_are_sampled_whole() -> None:
    lengths = [(torch.rand(4, 3, length), torch.zeros(4)) for length in range(5, 25)]
    flat = [(torch.rand(4, 3), torch.zeros(12)) for _ in range(20)]
    for given in (lengths, flat):
        sample = GivenBatches(given, torch.device("cpu"), "valid").sample(20).pairs
        assert [[part.shape for part in batch] for batch in sample] == [
            [part.shape for part in batch] for batch in given[::4]
        ]


def test_a_sample_does_not_keep_what_it_was_taken_from() -> None:
    given = [(torch.rand(64, 8), torch.zeros(64))]
    for part in GivenBatches(given, torch.device("cpu"), "valid").sample(8).pairs[0]:
        assert part.untyped_storage().nbytes() == part.nbytes


# --- with training between --------------------------------------------------------------------------------------------


def test_with_recovery_the_front_goes_down_to_the_target(trained: nn.Module) -> None:
    shrunk = rlsprune.shrink(
        trained, batches(0), target={"params": 0.2}, valid=batches(1), recovery_epochs=1, ratio=0.4
    )
    sizes = [point.params for point in shrunk.front]
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) > 3
    assert sizes[-1] <= 0.2 * sizes[0] < sizes[-2]
    assert shrunk.chosen is shrunk.front[-1]
    assert accuracy(trained) == shrunk.chosen.score > 90
    assert not trained.training


def test_without_a_ratio_recovery_follows_a_single_cut(trained: nn.Module) -> None:
    options: dict[str, Any] = {"target": {"params": 0.2}, "valid": batches(1)}
    closed = rlsprune.shrink(copy.deepcopy(trained), batches(0), **options)
    shrunk = rlsprune.shrink(trained, batches(0), recovery_epochs=1, **options)
    assert len(shrunk.front) == 2
    assert shrunk.chosen.epochs == 1
    assert (shrunk.chosen.params, shrunk.chosen.score_pruned) == (closed.chosen.params, closed.chosen.score)


def test_with_recovery_the_last_network_within_the_drop_comes_back(trained: nn.Module) -> None:
    before = accuracy(trained)
    shrunk = rlsprune.shrink(trained, batches(0), max_drop=2.0, valid=batches(1), ratio=0.6, recovery_epochs=1)
    assert shrunk.front[0].score == before
    assert shrunk.front[-1].score < before - 2.0, "it went on until it was too much"
    assert shrunk.chosen is shrunk.front[-2]
    assert accuracy(trained) == shrunk.chosen.score >= before - 2.0


def test_rounds_end_where_nothing_is_left_to_prune(trained: nn.Module) -> None:
    scores = itertools.count(1.0)
    options: dict[str, Any] = {"ratio": 0.9, "recovery_epochs": 1, "max_drop": 0.0}
    shrunk = rlsprune.shrink(trained, batches(0, 2), score=lambda network: next(scores), **options)
    assert (trained[0].out_features, trained[2].out_features) == (1, 1)
    assert shrunk.chosen is shrunk.front[-1]
    with pytest.raises(ValueError, match="has no parameters"):
        rlsprune.shrink(nn.ReLU(), torch.rand(4, 8, 1), target={"params": 0.5})
    with pytest.raises(ValueError, match="nothing to prune"):
        rlsprune.shrink(nn.Linear(1, 3), torch.rand(4, 8, 1), target={"params": 0.5})


@pytest.mark.parametrize("labels", [True, False])
def test_recovery_learns_from_labels_and_from_the_given_network(trained: nn.Module, labels: bool) -> None:
    given: list[Any] = list(batches(0)) if labels else inputs_of(batches(0))
    options: dict[str, Any] = {"target": {"params": 0.04}, "recovery_epochs": 3, "ratio": 0.9, "ignore": ["input"]}
    shrunk = rlsprune.shrink(trained, given, valid=batches(1) if labels else inputs_of(batches(1)), **options)
    assert shrunk.chosen.score > shrunk.chosen.score_pruned
    assert accuracy(trained) > 90


class NextToken(nn.Module):
    """Says the next token, and compares itself with labels that it shifts, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(31, 32), nn.Linear(32, 64), nn.Linear(64, 31)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(self.embed(input_ids)).relu())
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def sequences() -> Tensor:
    """Each token is three times the one before, plus one."""
    tokens = [torch.arange(31)]
    for _ in range(7):
        tokens.append((3 * tokens[-1] + 1) % 31)
    return torch.stack(tokens, 1)


def test_a_network_that_shifts_its_labels_recovers_by_its_own_loss() -> None:
    torch.manual_seed(0)
    model, ids = NextToken(), sequences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, ids)["loss"].backward()
        optimizer.step()

    def right() -> float:
        return float((model(ids)["logits"][:, :-1].argmax(-1) == ids[:, 1:]).float().mean())

    assert right() == 1
    given = -model(ids, ids)["loss"].item()
    labelled = [{"input_ids": ids, "labels": ids.clone()}] * 4
    shrunk = rlsprune.shrink(model, labelled, target={"params": 0.7}, recovery_epochs=3)
    assert shrunk.front[0].score == pytest.approx(given, rel=1e-4)
    assert shrunk.chosen.score == pytest.approx(-model(ids, ids)["loss"].item(), rel=1e-4)
    assert right() > 0.95


def test_labels_that_are_the_inputs_need_a_loss() -> None:
    class Silent(NextToken):
        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(input_ids)

    labelled = [{"input_ids": sequences(), "labels": sequences()}]
    with pytest.raises(ValueError, match="leave labels out, or give loss="):
        rlsprune.shrink(Silent(), labelled, target={"params": 0.7})


def test_a_network_whose_loss_is_cross_entropy_is_scored_by_accuracy() -> None:
    class Tags(NextToken):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            output = super().forward(input_ids)
            if labels is not None:
                output["loss"] = nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
            return output

    model, ids = Tags(), sequences()
    accuracy = 100 * float((model(ids)["logits"].argmax(-1) == ids % 2).float().mean())
    shrunk = rlsprune.shrink(model, [{"input_ids": ids, "labels": ids % 2}], target={"params": 0.7})
    assert shrunk.front[0].score == pytest.approx(accuracy)


def test_recovery_of_a_regression_minimises_the_squared_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(8, 64, 4)
    pairs = [(inputs, inputs[:, 0].sin()) for inputs in x]
    shrunk = rlsprune.shrink(
        model,
        pairs,
        target={"params": 0.7},
        recovery_epochs=20,
        valid=pairs,
        optimizer=lambda network: torch.optim.Adam(network.parameters(), lr=0.05),
    )
    error = torch.stack([(model(inputs)[:, 0] - wanted).square().mean() for inputs, wanted in pairs]).mean()
    assert shrunk.chosen.score == pytest.approx(-float(error.detach()), rel=1e-4)
    assert -shrunk.front[0].score > 4 * float(error.detach())


@pytest.mark.parametrize("loss", [None, nn.functional.mse_loss])
@pytest.mark.parametrize("recovery_epochs", [0, 2])
def test_regressor_is_scored_by_its_error_and_stops_before_it_is_ruined(loss: Any, recovery_epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 1))
    pairs = [(inputs, inputs[:, :1].sin() + inputs[:, 1:2].square()) for inputs in torch.randn(12, 64, 6)]
    train, valid = pairs[:8], pairs[8:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        for inputs, wanted in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()

    def error() -> float:
        with torch.no_grad():
            return float(torch.stack([nn.functional.mse_loss(model(x), y) for x, y in valid]).mean())

    before, variance = error(), float(torch.cat([y for _, y in valid]).var())
    options: dict[str, Any] = {"loss": loss, "recovery_epochs": recovery_epochs, "max_drop": 0.1 * variance}
    shrunk = rlsprune.shrink(model, train, valid=valid, **options)
    assert shrunk.front[0].score == pytest.approx(-before, rel=1e-4), "no accuracy: there are no classes"
    assert shrunk.chosen.params < shrunk.front[0].params
    assert error() <= before + 0.1 * variance
    assert shrunk.chosen.score == pytest.approx(-error(), rel=1e-4)


def test_the_rate_of_recovery_falls_to_zero_in_every_round(trained: nn.Module) -> None:
    rates: list[float] = []
    scores = itertools.chain([0.0], itertools.count(-100.0))

    class Watched(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            rates.append(self.param_groups[0]["lr"])
            super().step()

    rlsprune.shrink(
        trained,
        batches(0),
        target={"params": 0.6},
        valid=batches(1),
        score=lambda network: next(scores),
        optimizer=lambda network: Watched(network.parameters(), lr=0.1),
        recovery_epochs=2,
        ratio=0.3,
    )
    rounds = len(rates) // 32
    assert rounds >= 2
    assert rates == pytest.approx([0.1 * (1 - step / 32) for step in range(32)] * rounds)


def test_recovery_that_diverges_gives_the_last_good_network_back(trained: nn.Module) -> None:
    before, weights = accuracy(trained), [parameter.clone() for parameter in trained.parameters()]

    def explosive(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e30)

    with pytest.raises(FloatingPointError, match="epoch 1, batch 2: the loss is nan"):
        rlsprune.shrink(trained, batches(0), max_drop=1.0, valid=batches(1), optimizer=explosive, recovery_epochs=2)
    assert accuracy(trained) == before
    assert all(torch.equal(kept, now) for kept, now in zip(weights, trained.parameters(), strict=True))


# --- what is refused, and what is told --------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery_epochs", [0, 1])
def test_a_score_that_cannot_tell_networks_apart_is_refused(trained: nn.Module, recovery_epochs: int) -> None:
    weights = [parameter.clone() for parameter in trained.parameters()]
    with pytest.raises(ValueError, match="cannot tell networks apart"):
        rlsprune.shrink(
            trained, batches(0), max_drop=0, valid=batches(1), score=lambda model: 1.0, recovery_epochs=recovery_epochs
        )
    assert all(torch.equal(kept, now) for kept, now in zip(weights, trained.parameters(), strict=True))


def test_a_score_that_is_no_number_is_refused(trained: nn.Module) -> None:
    with pytest.raises(ValueError, match="not a number"):
        rlsprune.shrink(trained, batches(0), target={"params": 0.5}, score=lambda model: float("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give target, max_drop, or both"),
        ({"target": "params"}, "only a name"),
        ({"target": "depth", "max_drop": 1.0}, "depth"),
        ({"target": {}, "max_drop": 1.0}, "target={}"),
        ({"max_drop": -1.0}, "max_drop=-1.0"),
        ({"target": {"params": 0.5}, "recovery_epochs": -1}, "recovery_epochs=-1"),
        ({"target": {"params": 0.5}, "ratio": "0.3"}, "ratio='0.3'"),
        ({"target": {"params": 1.5}}, "1.5"),
        ({"target": {"params": "half"}}, "half"),
        ({"target": {"depth": 0.5}}, "depth"),
        ({"target": {"params": 0.5}, "ignore": ["nowhere"]}, "nowhere"),
        ({"target": {"params": 0.5}, "ratio": 1.0}, "ratio=1.0"),
    ],
)
def test_bad_arguments_leave_the_network_alone(trained: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rlsprune.shrink(trained, batches(0), valid=batches(1), **options)
    assert not any(layer._forward_hooks for layer in trained.modules())


def test_a_loss_without_targets_is_refused(trained: nn.Module) -> None:
    with pytest.raises(ValueError, match="loss needs targets"):
        rlsprune.shrink(
            trained, inputs_of(batches(0)), target={"params": 0.5}, loss=nn.functional.cross_entropy, recovery_epochs=1
        )


def test_no_batch_and_no_held_out_batches_are_said(trained: nn.Module) -> None:
    with pytest.raises(ValueError, match="batches has no batch"):
        rlsprune.shrink(trained, [], target={"params": 0.5}, valid=batches(1))
    with pytest.raises(ValueError, match="valid has no batch"):
        rlsprune.shrink(trained, batches(0), target={"params": 0.5}, valid=[])
    with pytest.warns(UserWarning, match="give valid="):
        rlsprune.shrink(trained, batches(0, 2), max_drop=1.0, target={"params": 0.9})
    with pytest.raises(TypeError, match="tuple of 3"):
        rlsprune.shrink(trained, [(torch.rand(2, 8),) * 3], target={"params": 0.5})


@pytest.mark.parametrize("name", ["batches", "valid"])
def test_batches_that_can_be_used_once_are_refused(trained: nn.Module, name: str) -> None:
    given = {"batches": batches(0), "valid": batches(1), name: iter(batches(0))}
    with pytest.raises(ValueError, match=f"{name} can be iterated only once"):
        rlsprune.shrink(trained, given["batches"], target={"params": 0.5}, valid=given["valid"])  # type: ignore[arg-type]


def test_progress_is_told_layer_by_layer_and_batch_by_batch(trained: nn.Module) -> None:
    told: list[tuple[str, int, int | None]] = []
    shrunk = rlsprune.shrink(
        trained,
        batches(0),
        target={"params": 0.5},
        valid=batches(1),
        recovery_epochs=2,
        ratio=0.3,
        on_progress=lambda *stage: told.append(stage),
    )
    assert told[0] == ("scoring", 0, None)
    assert not any("heads" in stage for stage, _, _ in told), "the network has none"
    assert ("round 1, choosing: 2", 2, 3) in told
    assert ("round 1, refitting: 4", 3, 3) in told
    assert [stage for stage in told if stage[0] == "round 1, recovery epoch 1 of 2"] == [
        ("round 1, recovery epoch 1 of 2", number, 16) for number in range(1, 17)
    ]
    rounds = {stage.split(",")[0] for stage, _, _ in told} - {"scoring"}
    assert len(rounds) == len(shrunk.front) - 1
    assert sum("recovery" in stage and number == 16 for stage, number, _ in told) == shrunk.front[-1].epochs


def test_a_layer_that_is_called_twice_is_refitted_for_both_calls() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.mix = nn.Linear(6, 20), nn.Linear(6, 20), nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.relu(self.first(x))
            return self.mix(gate) * self.mix(gate.square())

    model = Twice().double().eval()
    with torch.no_grad():
        for layer in (model.first,):  # the last ten units are copies of the first ten
            layer.weight[10:] = layer.weight[:10]
            layer.bias[10:] = layer.bias[:10]
    given = copy.deepcopy(model)
    x = torch.randn(256, 6, dtype=torch.float64)
    rlsprune.shrink(model, [x], target={"params": 0.75}, ignore=["second"])
    assert model.mix.in_features <= 15
    torch.testing.assert_close(model(x), given(x), rtol=2e-2, atol=2e-2)


def test_every_size_is_cut_from_the_whole_network(trained: nn.Module) -> None:
    inputs = inputs_of(batches(0))
    form = ClosedForm(trained, inputs[0][:1], Calibration(inputs, [64] * 16))
    first = form.plan({"flops": 0.5})
    form.apply(form.plan({"flops": 0.1}))
    assert form.plan({"flops": 0.5}) == first
    form.apply(first)
    weights = [parameter.clone() for parameter in trained.parameters()]
    form.apply(first)
    assert all(torch.equal(one, other) for one, other in zip(weights, trained.parameters(), strict=True))


def test_a_target_out_of_reach_is_said(trained: nn.Module) -> None:
    with pytest.warns(UserWarning, match="out of reach"):
        rlsprune.shrink(trained, batches(0, 4), target={"params": 0.1}, min_channels=32)
    assert (trained[0].out_features, trained[2].out_features) == (32, 32)


def test_a_target_out_of_reach_is_said_in_rounds_too(trained: nn.Module) -> None:
    options: dict[str, Any] = {"min_channels": 32, "recovery_epochs": 1, "ratio": 0.5}
    with pytest.warns(UserWarning, match="of the params is left") as said:
        rlsprune.shrink(trained, batches(0, 2), target={"params": 0.1}, **options)
    assert [warning.filename for warning in said] == [__file__]
    assert (trained[0].out_features, trained[2].out_features) == (32, 32)


class Slow(nn.Module):
    """Most of its time goes where nothing can be saved."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("ballast", torch.zeros(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y + (self.ballast @ self.ballast @ self.ballast).sum()


def test_a_time_out_of_reach_is_said_and_leaves_the_network_alone(trained: nn.Module) -> None:
    whole = parameter_count(trained)
    with pytest.warns(UserWarning, match="latency is left .* is gone, and nothing was cut for that"):
        rlsprune.shrink(Slow(trained), batches(0, 2), target={"latency": 0.1})
    assert parameter_count(trained) == whole


def test_a_target_beside_a_time_out_of_reach_is_reached(trained: nn.Module, recwarn: pytest.WarningsRecorder) -> None:
    shrunk = rlsprune.shrink(Slow(trained), batches(0, 2), target={"latency": 0.1, "params": 0.5})
    assert shrunk.chosen.params <= 0.5 * shrunk.front[0].params
    assert not recwarn.list


def test_the_harder_of_two_targets_is_not_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    # A fifth of the time is easily saved; no network has so few parameters.
    model = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)).eval()
    rlsprune.shrink(model, inputs_of(batches(0, 2)), target={"latency": 0.8, "params": 1e-5})
    assert parameter_count(model) > 1000
    assert not recwarn.list


class Residual(nn.Module):
    """A sum that is made in place, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.inner = nn.Linear(12, 24), nn.Linear(24, 48)
        self.branch, self.end = nn.Linear(48, 24), nn.Linear(24, 5)
        self.in_place = in_place

    def forward(self, inputs: Tensor) -> Tensor:
        shortcut = self.start(inputs).relu()
        hidden = self.branch(self.inner(shortcut).relu())
        if self.in_place:
            hidden.add_(shortcut)
        else:
            hidden = hidden + shortcut
        return self.end(hidden.relu())


def test_a_sum_in_place_is_refitted_as_any_other() -> None:
    inputs = torch.rand(512, 12, generator=torch.Generator().manual_seed(1))
    outputs = []
    for in_place in (True, False):
        model = Residual(in_place)
        rlsprune.shrink(model, inputs.split(64), target={"params": 0.5})
        outputs.append(model(inputs).detach())
    torch.testing.assert_close(outputs[0], outputs[1])


class Normed(nn.Module):
    """Two branches, each with a batch norm of its own or both with the same."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(12, 24, bias=False), nn.Linear(12, 24, bias=False)
        self.norm = nn.BatchNorm1d(24)
        self.again = self.norm if shared else nn.BatchNorm1d(24)
        self.end = nn.Linear(48, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        branches = self.norm(self.one(inputs)), self.again(self.other(inputs - 1))
        return self.end(torch.cat(branches, 1).relu())


def test_training_mode_computes_what_evaluation_mode_does_right_after_the_cut() -> None:
    inputs, model = torch.rand(512, 12, generator=torch.Generator().manual_seed(1)), Normed(shared=False)
    rlsprune.shrink(model, inputs.split(64), target={"params": 0.5}, ignore=["input"])
    model.eval()
    wanted = model(inputs)
    torch.testing.assert_close(model.train()(inputs), wanted, rtol=1e-4, atol=1e-5)


def test_a_batch_norm_that_layers_share_is_left_alone_and_named() -> None:
    inputs, model = torch.rand(512, 12, generator=torch.Generator().manual_seed(1)), Normed(shared=True)
    with pytest.warns(UserWarning, match=r"called several times: 'norm'.*set these modules to eval\(\)"):
        rlsprune.shrink(model, inputs.split(64), target={"params": 0.5}, ignore=["input"])
    assert model.norm.running_mean is not None
    assert len(model.norm.running_mean) < 24
    assert not model.norm.running_mean.any(), "as it was given"


def test_whole_numbers_beside_one_output_are_no_class_labels() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)), torch.rand(256, 6)
    pairs = [(x, (x.sum(1) > 3).long()) for x in inputs.split(64)]
    small = rlsprune.shrink(model, pairs, target={"params": 0.5}, recovery_epochs=1)
    assert small.front[0].score < 0, "minus the squared error, not the share of zeros"


def test_a_network_whose_layers_are_all_called_twice_is_cut() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.down(self.up(self.down(self.up(inputs).relu())).relu())

    torch.manual_seed(0)
    model, inputs = Twice(), torch.rand(256, 6)
    small = rlsprune.shrink(model, inputs.split(64), target={"params": 0.7}, ignore=["input"])
    assert small.chosen.params <= 0.7 * small.front[0].params
    assert model(inputs).isfinite().all()


def test_inside_autocast_the_result_is_the_same(trained: nn.Module) -> None:
    inputs, other = inputs_of(batches(0)), copy.deepcopy(trained)
    rlsprune.shrink(other, inputs, target={"flops": 0.5})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained(inputs[0])  # autocast remembers these weights
        rlsprune.shrink(trained, inputs, target={"flops": 0.5})
        assert trained(inputs[0]).dtype == torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(trained.parameters(), other.parameters(), strict=True))


def test_an_autocast_in_the_forward_holds_while_layers_are_refitted() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.last = nn.Linear(8, 32), nn.Linear(32, 2).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.one(x)
            y = y.relu()
            return nn.functional.linear(y, self.last.weight, self.last.bias).float()

    torch.manual_seed(0)
    model = Casts().eval()
    shrunk = rlsprune.shrink(model, inputs_of(batches(0)), target={"params": 0.5})
    assert shrunk.chosen.params <= 0.5 * shrunk.front[0].params
    assert shrunk.chosen.score > 80


@pytest.mark.parametrize("options", [{}, {"recovery_epochs": 2}, {"max_drop": 20.0}], ids=["plain", "recovery", "drop"])
def test_an_autocast_in_the_forward_never_remembers_weights_that_are_gone(options: dict[str, Any]) -> None:
    class Casts(nn.Sequential):
        remembers = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.remembers):
                return super().forward(x).float()

    results = []
    for remembers in (False, True):
        torch.manual_seed(0)
        model = Casts(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        model.remembers = remembers
        labelled = [(x, model(x).argmax(1)) for x in inputs_of(batches(0))]
        rlsprune.shrink(model, labelled, target={"params": 0.5}, **options)
        results.append(model.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_network_that_needs_several_inputs_at_once_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9, track_running_stats=False), nn.Linear(9, 2)).eval()
    with pytest.raises(ValueError, match="batch norm '1' keeps no running statistics"):
        rlsprune.shrink(model, inputs_of(batches(0)), target={"flops": 0.5})
