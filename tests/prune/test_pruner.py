"""The pruner: what an event does and does not do to the model, the optimizer and everything that refers to them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rlsprune
from networks import SHAPES, cnn, fnn, train, trained
from rlsprune.prune import surgery
from rlsprune.statistics.inputs import RowSample

EXAMPLE = torch.rand(2, 20).double()


def make_pruner(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> rlsprune.Pruner:
    options = {"warmup_epochs": 0, "criterion": "obs", "ratio": 0.3} | options
    shape = SHAPES[fnn] if isinstance(model[0], nn.Linear) else SHAPES[cnn]
    return rlsprune.Pruner(model, optimizer, torch.rand(2, *shape).double(), **options)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())["state"]}
    values["sizes"] = [tensor.shape for tensor in model.state_dict().values()]
    values["attributes"] = [repr(module) for module in model.modules()]
    return values


def assert_unchanged(before: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    after = everything(model, optimizer)
    assert after.pop("attributes") == before["attributes"]
    assert after.pop("sizes") == before["sizes"]
    assert after["model"].keys() == before["model"].keys()
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"], before["optimizer"], rtol=0, atol=0)


# --- surgery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fnn, cnn])
def test_without_compensation_the_network_equals_the_old_one_with_those_channels_zeroed(make: Any) -> None:
    model, optimizer = trained(make)
    pruner = make_pruner(model, optimizer, compensate=False, statistics="training")
    whole = copy.deepcopy(model)
    event = pruner.prune()
    inputs = torch.rand(5, *SHAPES[make]).double()
    groups = {group.name: group for group in rlsprune.Pruner(whole, torch.optim.SGD(whole.parameters()), inputs).groups}
    for name, units in event.removed.items():
        for consumer in groups[name].consumers:
            taken = consumer.index[units].flatten()
            consumer.module.weight.data[:, taken] = 0
    torch.testing.assert_close(model(inputs), whole(inputs))


def test_parameters_hooks_flags_schedulers_and_groups_survive() -> None:
    model, optimizer = trained(fnn)
    parameters = dict(model.named_parameters())
    model[2].bias.requires_grad_(False)
    calls: list[str] = []
    model[2].register_forward_hook(lambda *_: calls.append("forward"))
    model[2].weight.register_hook(lambda _: calls.append("gradient"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    pruner = make_pruner(model, optimizer)
    train(model, optimizer, (20,), 2)
    assert pruner.step(1.0).params_after < 1000
    calls.clear()
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups
    assert not model[2].bias.requires_grad
    assert all(p.grad is None for p in (model[0].weight, model[2].weight))
    train(model, optimizer, (20,), 1)
    scheduler.step()
    assert calls == ["forward", "gradient"]
    assert optimizer.param_groups[0]["lr"] == 0.15


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "rls": lambda m: rlsprune.RLS(m, lr=0.3),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["muon"] = lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2])


@pytest.mark.parametrize("make", [fnn, cnn])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_prune_every_parameter_trains_on_under_any_optimizer(name: str, make: Any) -> None:
    model = make().double()
    optimizer = OPTIMIZERS[name](model)
    pruner = make_pruner(model, optimizer)
    train(model, optimizer, SHAPES[make], 3)
    assert pruner.prune().params_after < pruner.history[0].params_before
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = copy.deepcopy(model)
    train(model, optimizer, SHAPES[make], 1)
    for (key, p), old in zip(model.named_parameters(), before.parameters(), strict=True):
        if id(p) in owned and p.grad is not None and p.grad.abs().sum() > 0:
            assert not torch.equal(p, old), key


def test_a_loss_still_alive_does_not_disturb_the_next_backward() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer)
    inputs = torch.rand(32, 20).double()
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    pruner.step(loss)
    model(inputs).square().mean().backward()
    optimizer.step()
    assert loss.grad_fn is not None


@pytest.mark.parametrize("inverse", ["schur", "slice"])
def test_removing_what_is_already_dead_leaves_the_trajectory_as_it_was(inverse: str) -> None:
    """Channels zero in and out, and inputs that are always zero, may go without a trace in what follows."""

    def dead(group: rlsprune.Group) -> list[Tensor]:
        score = torch.ones(group.size)
        score[[1, 4]] = 0
        return [score]

    trajectories = []
    for prune in (False, True):
        model = fnn().double()
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight[[1, 4]], layer.bias[[1, 4]] = 0.0, -1.0
            for layer in (model[2], model[4]):
                layer.weight[:, [1, 4]] = 0
        optimizer = rlsprune.RLS(model, lr=0.3)
        pruner = make_pruner(
            model,
            optimizer,
            criterion=dead,
            ratio={"input": 0.1, "0": 0.1, "2": 0.13},
            inverse=inverse,
            statistics="training",
        )
        losses = []
        for epoch in range(6):
            generator = torch.Generator().manual_seed(epoch)
            for _ in range(5):
                inputs = torch.rand(16, 20, generator=generator).double()
                inputs[:, [1, 4]] = 0
                optimizer.zero_grad()
                loss = (model(inputs) - inputs[:, :3]).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if prune and epoch == 2:
                assert pruner.prune().removed == {"input": [1, 4], "0": [1, 4], "2": [1, 4]}
        trajectories.append(losses)
    assert trajectories[1] == pytest.approx(trajectories[0], rel=1e-9)
    assert trajectories[0][-1] < trajectories[0][0]


@pytest.mark.parametrize("rank", [None, 2])
def test_a_reset_p_is_that_of_a_new_optimizer_and_only_of_layers_that_lose_inputs(rank: int | None) -> None:
    model = fnn().double()
    settings = {"lr": 0.3, "momentum": 0.0, "p0": 0.5, "rank": rank}
    optimizer = rlsprune.RLS(model, **settings)
    pruner = make_pruner(model, optimizer, ratio={"0": 0.5}, inverse="reset")
    train(model, optimizer, (20,), 4)
    before = {name: optimizer.inverse(name).clone() for name in ("0", "2", "4")}
    pruner.preview()
    for name, P in before.items():
        assert torch.equal(optimizer.inverse(name), P)
    assert pruner.prune().removed.keys() == {"0"}
    assert torch.equal(optimizer.inverse("2"), 0.5 * torch.eye(13).double())
    for name in ("0", "4"):
        assert torch.equal(optimizer.inverse(name), before[name])
    fresh = copy.deepcopy(model)
    train(fresh, rlsprune.RLS(fresh, **settings), (20,), 1)
    train(model, optimizer, (20,), 1)
    torch.testing.assert_close(model[2].weight, fresh[2].weight, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(model[0].weight, fresh[0].weight, rtol=1e-6)


def test_an_error_half_way_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer)
    average = copy.deepcopy(model)
    pruner.follow(average)
    train(model, optimizer, (20,), 2)
    before, sizes = everything(model, optimizer), [group.size for group in pruner.groups]
    original = surgery.apply_cuts

    def fail_at_the_last_layer(model: nn.Module, cuts: Any, *rest: Any) -> None:
        original(model, cuts, *rest)
        if "4.weight" in cuts.tensors:
            raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(surgery, "apply_cuts", fail_at_the_last_layer)
        with pytest.raises(MemoryError):
            pruner.step(0.5)
    assert_unchanged(before, model, optimizer)
    assert [group.size for group in pruner.groups] == sizes
    assert not pruner.history
    assert average[0].weight.shape == model[0].weight.shape
    assert pruner.kept_inputs is None
    assert pruner.prune() is not None
    train(model, optimizer, (20,), 1)


def test_preview_shows_what_prune_does_and_changes_nothing() -> None:
    model, optimizer = trained(cnn)
    pruner = make_pruner(model, optimizer)
    train(model, optimizer, (3, 8, 8), 2)
    before = everything(model, optimizer)
    gradients = [p.grad for p in model.parameters()]
    preview = pruner.preview()
    assert_unchanged(before, model, optimizer)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
    assert not pruner.history
    event = pruner.prune()
    assert (event.removed, event.layers, event.params_after) == (preview.removed, preview.layers, preview.params_after)
    assert str(preview).replace("would be pruned", "pruned") == str(event)


def test_preview_changes_nothing_in_double_precision_without_biases() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = make_pruner(model, optimizer, ratio=0.5)
    train(model, optimizer, (20,), 1)
    before = everything(model, optimizer)
    assert pruner.preview() is not None
    assert_unchanged(before, model, optimizer)


def test_copies_shrink_with_the_model() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    pruner.follow(average)
    train(model, optimizer, (20,), 2)
    average.update_parameters(model)
    pruner.prune()
    average.update_parameters(model)
    assert average(EXAMPLE).shape == (2, 3)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in average.module.named_parameters()} == shapes


def test_a_copy_whose_indices_would_be_averaged_is_refused() -> None:
    model, optimizer = trained(fnn)
    average = AveragedModel(model, use_buffers=True)
    with pytest.raises(ValueError, match=r"use_buffers=False.*or prune with input_ratio=0"):
        make_pruner(model, optimizer).follow(average)
    make_pruner(model, optimizer, input_ratio=0).follow(average)


def test_inputs_are_sampled_only_in_epochs_that_may_end_with_a_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the first, since nobody knows then whether there will be epochs: `prune` can be called at any time."""
    calls: list[int] = []
    add = RowSample.add
    monkeypatch.setattr(RowSample, "add", lambda self, *args: (calls.append(1), add(self, *args)))
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, warmup_epochs=3, target={"params": 0.9}, tolerance=9.0)
    sampled = []
    for _ in range(7):
        calls.clear()
        train(model, optimizer, (20,), 2)
        sampled.append(len(calls))
        pruner.step(1.0)
    assert [event.epoch for event in pruner.history] == [4]
    assert sampled == [6, 0, 0, 6, 6, 0, 0], "once the target is reached, no more"


def test_what_is_no_copy_is_refused() -> None:
    model, optimizer = trained(fnn)
    other = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises(
        ValueError, match=r"'0.weight' has the shape \(30, 20\) in the copy and \(24, 20\) in the model"
    ):
        make_pruner(model, optimizer).follow(other)
    with pytest.raises(ValueError, match=r"'0.weight' has the shape None in the copy"):
        make_pruner(model, optimizer).follow(nn.ReLU())


def test_the_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the model's parameters"):
        make_pruner(fnn().double(), torch.optim.SGD(fnn().parameters(), lr=0.1))


def test_what_was_frozen_since_the_prune_stays_frozen_when_it_is_rolled_back() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, warmup_epochs=0, patience=1)
    train(model, optimizer, (20,), 1)
    assert pruner.step(1.0) is not None
    model[0].weight.requires_grad_(False)
    train(model, optimizer, (20,), 1)
    pruner.step(2.0)
    assert pruner.history[-1].kind == "roll-back"
    assert model[0].weight.shape == (24, 20)
    assert not model[0].weight.requires_grad
    assert model[2].weight.requires_grad


def test_a_copy_that_could_not_be_rolled_back_is_refused() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, warmup_epochs=0)
    train(model, optimizer, (20,), 1)
    assert pruner.step(1.0) is not None
    with pytest.raises(RuntimeError, match="before the first prune"):
        pruner.follow(copy.deepcopy(model))


@pytest.mark.parametrize("inverse", ["schur", "slice", "reset"])
@pytest.mark.parametrize("criterion", ["obs", "rls", "rls-paper"])
def test_no_matrix_of_all_inputs_is_made_of_factors(
    criterion: str, inverse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(cnn, rank=4)
    monkeypatch.setattr("rlsprune.optim.factored.Factored.dense", None)
    monkeypatch.setattr("rlsprune.statistics.inverse.DenseInverse.__init__", None)
    pruner = make_pruner(model, optimizer, criterion=criterion, inverse=inverse, statistics="training", ratio=0.4)
    pruner.prune()
    train(model, optimizer, (3, 8, 8), 2)
    assert len(pruner.history) == 1


def test_factors_shrink_with_their_layer_beyond_their_rank() -> None:
    model, optimizer = trained(cnn, rank=4)
    pruner = make_pruner(model, optimizer, statistics="training", ratio=0.4)
    for _ in range(4):
        pruner.prune()
        for name in ("3", "6", "8"):
            layer = model.get_submodule(name)
            assert optimizer.inverse(name).shape == (layer.weight[0].numel() + 1,) * 2
        train(model, optimizer, (3, 8, 8), 2)
    assert all(health.healthy for health in optimizer.check().values())


# --- compensation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fnn, cnn])
def test_compensation_keeps_the_output_better(make: Any) -> None:
    inputs = torch.rand(200, *SHAPES[make]).double()
    errors = {}
    for compensate in (False, True):
        model, optimizer = trained(make)
        pruner = make_pruner(model, optimizer, compensate=compensate)
        train(model, optimizer, SHAPES[make], 20)
        before = model(inputs).detach()
        pruner.prune()
        errors[compensate] = (model(inputs) - before).square().mean().item()
    assert errors[True] < 0.7 * errors[False]


def test_redundant_channels_go_without_any_loss() -> None:
    """Where channels are copies of others, the refit takes over their whole share."""
    model, optimizer = trained(fnn)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            half = len(layer.weight) // 2
            layer.weight[half:], layer.bias[half:] = layer.weight[:half], layer.bias[:half]
    pruner = make_pruner(
        model, optimizer, ratio=0.5, input_ratio=0.0, criterion=lambda group: [-torch.arange(float(group.size))]
    )
    inputs = torch.rand(300, 20).double()
    before = model(inputs).detach()
    pruner.calibrate([inputs])
    event = pruner.prune()
    assert event.removed["0"] == list(range(12, 24))
    error = (model(inputs) - before).square().mean() / before.var()
    assert error < 1e-3


# --- input features ---------------------------------------------------------------------------------------------------


def test_the_model_takes_the_same_inputs_and_uses_the_kept_ones() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, criterion="rls", ratio=0.5, compensate=False)
    assert pruner.kept_inputs is None
    train(model, optimizer, (20,), 2)
    pruner.prune()
    pruner.calibrate([torch.rand(64, 20).double()])
    pruner.prune()
    kept = pruner.kept_inputs
    assert len(kept) == 12  # 20 − ⌊20/4⌋ − ⌊15/4⌋
    inputs = torch.rand(4, 20).double()
    noise = inputs.clone()
    dropped = [i for i in range(20) if i not in kept.tolist()]
    noise[:, dropped] = 99.0
    torch.testing.assert_close(model(noise), model(inputs), rtol=0, atol=0)
    torch.testing.assert_close(pruner.strip_inputs()(inputs[:, kept]), model(inputs))


def test_image_channels_are_left_alone() -> None:
    model, optimizer = trained(cnn)
    pruner = make_pruner(model, optimizer)
    pruner.calibrate([torch.rand(64, 3, 8, 8).double()])
    pruner.prune()
    assert model[0].in_channels == 3
    assert pruner.kept_inputs is None


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_the_gate_of_algorithm_1() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, warmup_epochs=2, tolerance=0.0, patience=None, statistics="training")
    pruned = [pruner.step(loss) is not None for loss in (0.5, 0.4, 0.6, 0.7, 0.6, 0.59, 0.58)]
    assert pruned == [False, False, True, False, False, True, True]
    assert [event.epoch for event in pruner.history] == [3, 6, 7]
    assert [event.loss for event in pruner.history] == [0.6, 0.59, 0.58]


def test_without_recovery_the_last_prune_is_rolled_back_and_pruning_ends() -> None:
    model, optimizer = trained(fnn)
    events: list[rlsprune.PruneEvent] = []
    pruner = make_pruner(model, optimizer, patience=2, on_prune=events.append)
    train(model, optimizer, (20,), 3)
    assert pruner.step(0.5) is not None
    train(model, optimizer, (20,), 3)
    recovered = everything(model, optimizer)
    kept = pruner.kept_inputs.tolist()
    assert pruner.step(0.4) is not None
    train(model, optimizer, (20,), 3)
    assert pruner.step(0.9) is None
    assert not pruner.done
    train(model, optimizer, (20,), 3)
    assert pruner.step(0.8) is None
    assert pruner.done
    assert_unchanged(recovered, model, optimizer)
    assert pruner.kept_inputs.tolist() == kept
    assert [event.kind for event in events] == ["prune", "prune", "roll-back"]
    assert events == pruner.history
    assert events[2].params_after == events[1].params_before
    train(model, optimizer, (20,), 2)
    assert pruner.step(0.1) is None


def test_rolling_the_first_prune_back_gives_the_whole_network_again() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, patience=1)
    train(model, optimizer, (20,), 3)
    whole = everything(model, optimizer)
    pruner.step(0.5)
    assert pruner.kept_inputs is not None
    train(model, optimizer, (20,), 3)
    pruner.step(0.6)
    assert_unchanged(whole, model, optimizer)
    assert pruner.kept_inputs is None


@pytest.mark.parametrize("recovers", [True, False])
def test_finish_never_hands_back_a_network_that_did_not_recover(recovers: bool) -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, target={"params": 0.7})
    train(model, optimizer, (20,), 3)
    whole = pruner.step(0.5).params_before
    pruner.step(0.4 if recovers else 0.6)
    pruner.finish()
    assert pruner.done
    assert (sum(p.numel() for p in model.parameters()) == whole) == (not recovers)


@pytest.mark.parametrize("what", ["params", "flops"])
def test_pruning_stops_at_the_target_and_not_far_below_it(what: str) -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, target={what: 0.5}, ratio=0.5, patience=None, statistics="training")
    for epoch in range(8):
        pruner.step(1 / (epoch + 1))
    assert pruner.done
    start, last = getattr(pruner.history[0], f"{what}_before"), pruner.history[-1]
    assert 0.44 * start < getattr(last, f"{what}_after") <= 0.5 * start < getattr(last, f"{what}_before")
    assert [health.healthy for health in optimizer.check().values()] == [True] * 3
    train(model, optimizer, (20,), 2)


def test_a_latency_target_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = iter([10.0, 9.0, 6.0, *[4.0] * 20])
    monkeypatch.setattr("rlsprune.prune.budget.latency", lambda *_: (next(timings), 0.0))
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, target={"latency": 0.5}, ratio=0.2, patience=None, statistics="training")
    pruned = [pruner.step(1 / (epoch + 1)) is not None for epoch in range(4)]
    assert pruned == [True, True, False, False]
    assert pruner.done


def test_an_event_that_chooses_nothing_warns_and_moves_the_gate() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, ratio=0.01, patience=1, statistics="training")
    with pytest.warns(UserWarning, match=r"nothing was pruned in epoch 1.*ratio=0\.01"):
        assert pruner.step(0.5) is None
    assert pruner.step(0.6) is None
    with pytest.warns(UserWarning, match="epoch 3"):
        assert pruner.step(0.4) is None
    assert not pruner.done


def test_round_to_and_min_channels_hold_over_events() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, ratio=0.4, round_to=4, min_channels=8, statistics="training", patience=None)
    for _ in range(3):
        pruner.prune()
    while (model[0].out_features, model[2].out_features) != (8, 8) or pruner.groups[0].size > 4:
        assert pruner.prune() is not None
    with pytest.warns(UserWarning, match="nothing was pruned"):
        assert pruner.prune() is None


# --- statistics -------------------------------------------------------------------------------------------------------


def test_calibrate_makes_a_prune_possible_before_any_training() -> None:
    model = fnn().double()
    pruner = make_pruner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="calibrate"):
        pruner.prune()
    pruner.calibrate([(torch.rand(64, 20).double(), torch.zeros(64)) for _ in range(3)])
    assert model.training
    assert pruner.prune() is not None
    with pytest.raises(ValueError, match="no batch"):
        pruner.calibrate([])


def test_calibrate_is_refused_where_it_would_do_nothing() -> None:
    model, optimizer = trained(fnn)
    with pytest.raises(ValueError, match="statistics='training'"):
        make_pruner(model, optimizer, statistics="training").calibrate([EXAMPLE])


# --- saving and resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer_name", "inverse"), [("rls", "schur"), ("rls", "reset"), ("adam", "schur")])
def test_a_resumed_run_ends_with_the_same_numbers(optimizer_name: str, inverse: str, tmp_path: Path) -> None:
    def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: rlsprune.Pruner, which: range) -> None:
        for epoch in which:
            train(model, optimizer, (20,), 6, seed=epoch)
            pruner.step([0.9, 0.5, 0.4, 0.6, 0.7, 0.8][epoch])

    def start() -> tuple[nn.Module, torch.optim.Optimizer, rlsprune.Pruner]:
        model = fnn().double()
        optimizer = OPTIMIZERS[optimizer_name](model)
        return model, optimizer, make_pruner(model, optimizer, warmup_epochs=1, patience=3, inverse=inverse)

    straight, straight_optimizer, straight_pruner = start()
    epochs(straight, straight_optimizer, straight_pruner, range(6))

    model, optimizer, pruner = start()
    epochs(model, optimizer, pruner, range(4))
    pruner.save(tmp_path / "model.safetensors")
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    model = rlsprune.load(tmp_path / "model.safetensors", into=fnn().double())
    optimizer = OPTIMIZERS[optimizer_name](model)
    optimizer.load_state_dict(saved["optimizer"])
    pruner = make_pruner(model, optimizer, warmup_epochs=1, patience=3, inverse=inverse)
    pruner.load_state_dict(saved["pruner"])
    epochs(model, optimizer, pruner, range(4, 6))
    assert [event.kind for event in pruner.history] == ["prune", "prune", "roll-back"]
    assert pruner.history == straight_pruner.history
    assert_unchanged(everything(straight, straight_optimizer), model, optimizer)


def test_history_is_in_the_saved_files_metadata(tmp_path: Path) -> None:
    from rlsprune.io.modelfile import read_metadata

    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    event = pruner.prune()
    pruner.save(tmp_path / "small.safetensors")
    (saved,) = read_metadata(tmp_path / "small.safetensors")["metadata"]["history"]
    assert rlsprune.PruneEvent.from_dict(saved) == event
    small = rlsprune.load(tmp_path / "small.safetensors", into=fnn().double())
    torch.testing.assert_close(small(EXAMPLE), model(EXAMPLE))


def test_an_event_prints_as_a_table() -> None:
    model, optimizer = trained(fnn)
    event = make_pruner(model, optimizer, statistics="training", ratio=0.5).step(0.25)
    lines = str(event).splitlines()
    assert lines[0] == "epoch 1: pruned, refitted layer by layer, loss 0.25"
    rows = [line.split() for line in lines[2:]]
    assert rows[0] == ["input", "20", "15", "75.0", "%"]
    assert rows[1] == ["0", "24", "12", "50.0", "%"]
    assert rows[3] == ["4", "3", "3", "100.0", "%"]
    assert rows[4][:2] == ["parameters", str(20 * 24 + 24 + 24 * 16 + 16 + 16 * 3 + 3)]
    assert len({len(line) for line in lines[2:]}) == 1


# --- nothing silent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.5}, r"ratio=1\.5 .*\(0, 1\)"),
        ({"ratio": 0.0}, r"ratio=0\.0"),
        ({"ratio": "0.4"}, r"ratio='0\.4'"),
        ({"round_to": 3.5}, r"round_to=3\.5 .*whole number"),
        ({"target": 0.1}, r"target=0\.1 .*a mapping such as"),
        ({"ratio": {"0": 2.0}}, r"ratio\['0'\]=2\.0"),
        ({"ratio": {"nowhere": 0.5}}, r"ratio names \['nowhere'\].*there are \['0', '2', 'input'\]"),
        ({"input_ratio": -0.1}, r"input_ratio=-0\.1"),
        ({"criterion": "best"}, r"criterion='best' .*rls"),
        ({"inverse": "cut"}, "inverse='cut'"),
        ({"statistics": "some"}, "statistics='some'"),
        ({"min_channels": 0}, "min_channels=0"),
        ({"round_to": 0}, "round_to=0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"patience": 0}, "patience=0"),
        ({"tolerance": -0.1}, r"tolerance=-0\.1"),
        ({"target": {"size": 0.5}}, r"target=.*params/flops/latency"),
        ({"target": {"params": 1.5}}, r"target=.*1\.5"),
        ({"ignore": ["nowhere"]}, "nowhere"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model = fnn().double()
    with pytest.raises(ValueError, match=message):
        make_pruner(model, rlsprune.RLS(model), **options)


def test_what_cannot_be_pruned_is_refused_with_the_reason() -> None:
    model = fnn().double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer is SGD: use statistics='exact'"):
        make_pruner(model, sgd, statistics="training")
    with pytest.raises(ValueError, match="LBFGS"):
        make_pruner(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"shape \(2, 7\)"):
        rlsprune.Pruner(model, sgd, torch.rand(2, 7).double())
    with pytest.raises(ValueError, match=r"DataParallel.*\.module"):
        rlsprune.Pruner(nn.DataParallel(model), sgd, EXAMPLE)
    with pytest.raises(ValueError, match=r"compiled.*_orig_mod"):
        rlsprune.Pruner(torch.compile(model), sgd, EXAMPLE)
    head = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=r"nothing to prune.*output"):
        rlsprune.Pruner(head, torch.optim.SGD(head.parameters(), lr=0.1), torch.rand(1, 3, 5, 5))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="Unfreeze"):
        make_pruner(model, sgd)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_and_counts_for_nothing(loss: float) -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    with pytest.raises(ValueError, match="diverged"):
        pruner.step(loss)
    assert pruner.step(0.5).epoch == 1


def test_finish_gives_the_event_of_the_roll_back() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    pruned = pruner.step(0.5)
    assert pruner.step(0.6) is None, "it has not recovered"
    event = pruner.finish()
    assert event.kind == "roll-back"
    assert (event.params_before, event.params_after) == (pruned.params_after, pruned.params_before)
    assert pruner.history[-1] is event
    assert pruner.finish() is None, "nothing is left to roll back"


@pytest.mark.parametrize(
    ("options", "losses", "reason"),
    [
        ({"warmup_epochs": 30}, [0.5, 0.4], "only 2 epochs.*warmup_epochs=30"),
        ({"ratio": 0.01}, [], "only 0 epochs"),
        ({"ratio": 0.01}, [0.5], r"ratio=0\.01"),
    ],
)
def test_finish_says_why_nothing_was_ever_pruned(options: dict[str, Any], losses: list[float], reason: str) -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the events that chose nothing
        for loss in losses:
            pruner.step(loss)
    with pytest.warns(UserWarning, match=f"nothing was ever pruned: .*{reason}"):
        assert pruner.finish() is None


def test_stop_ends_pruning_and_recovery_is_still_noticed() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    assert pruner.step(0.5) is not None
    pruner.stop()
    assert pruner.done
    assert pruner.step(0.4) is None
    assert pruner.recovered
    assert pruner.finish() is None
    with pytest.raises(AttributeError):
        pruner.done = False


def test_as_in_paper_is_algorithm_1() -> None:
    """The settings of the paper, as its reference has them (tests/reference), and the same choice of channels."""
    model, optimizer = trained(fnn, rank=None)
    twin, twins = trained(fnn, rank=None)
    paper = rlsprune.Pruner.as_in_paper(model, optimizer, EXAMPLE, warmup_epochs=0)
    by_hand = rlsprune.Pruner(
        twin,
        twins,
        EXAMPLE,
        ratio=0.4,
        warmup_epochs=0,
        criterion="rls-paper",
        compensate=False,
        inverse="slice",
        statistics="training",
        patience=None,
    )
    assert paper.step(0.5).removed == by_hand.step(0.5).removed
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    whole = fnn().double()
    by_default = rlsprune.Pruner.as_in_paper(whole, rlsprune.RLS(whole, rank=None), EXAMPLE)
    assert by_default._state.gate.warmup_epochs == 30
    with pytest.raises(ValueError, match="not with SGD"):
        rlsprune.Pruner.as_in_paper(whole, torch.optim.SGD(whole.parameters()), EXAMPLE)
    with pytest.raises(ValueError, match=r"rank=16: use RLS\(model, rank=None\)"):
        rlsprune.Pruner.as_in_paper(whole, rlsprune.RLS(whole), EXAMPLE)


def test_settings_are_keywords_and_arguments_in_another_order_are_told() -> None:
    model = fnn().double()
    optimizer = rlsprune.RLS(model)
    with pytest.raises(TypeError, match="positional"):
        rlsprune.Pruner(model, optimizer, EXAMPLE, 0.4)
    with pytest.raises(TypeError, match="the model comes first"):
        rlsprune.Pruner(optimizer, model, EXAMPLE)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, not list"):
        rlsprune.Pruner(model, list(model.parameters()), EXAMPLE)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module as its model, not function"):
        rlsprune.Pruner(fnn, optimizer, EXAMPLE)


def test_repr_tells_how_far_pruning_has_come() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    whole = sum(p.numel() for p in model.parameters())
    assert repr(pruner) == f"Pruner(3 groups, {whole:,} parameters (100 %), epoch 0, no event yet)"
    event = pruner.step(0.5)
    share = 100 * event.params_after / whole
    assert repr(pruner) == f"Pruner(3 groups, {event.params_after:,} parameters ({share:.3g} %), epoch 1, 1 event)"


def test_tied_weights_never_leave_a_network_that_does_not_run(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        tied, again = nn.Linear(20, 20), nn.Linear(20, 20)
        again.weight = tied.weight
        return nn.Sequential(tied, nn.ReLU(), again, nn.ReLU(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))

    model, inputs = build(), torch.rand(32, 20)
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs[:1], ratio=0.5)
    pruner.calibrate([inputs])
    assert pruner.prune().params_after < pruner.history[0].params_before
    pruner.save(tmp_path / "small.safetensors")
    loaded = rlsprune.load(tmp_path / "small.safetensors", into=build())
    torch.testing.assert_close(loaded(inputs), model(inputs))


class NeedsItsWidth(nn.Module):
    """Runs at its own width, until told to insist on it."""

    insists = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).relu()
        if self.insists and hidden.shape[-1] != 12:
            raise IndexError("width")
        return self.last(hidden)


def test_an_event_after_which_the_network_does_not_run_is_undone() -> None:
    model, inputs = NeedsItsWidth(), torch.rand(32, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, inputs[:1], ratio=0.5)
    pruner.calibrate([inputs])
    model.insists = True
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"does not run without the chosen channels \(IndexError: width\).*ignore="):
        pruner.prune()
    assert_unchanged(before, model, optimizer)
    assert pruner.history == []


def test_inference_mode_is_refused() -> None:
    model, optimizer = trained(fnn)
    pruner = make_pruner(model, optimizer, statistics="training")
    before = everything(model, optimizer)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*no_grad"):
        pruner.prune()
    assert_unchanged(before, model, optimizer)
    with torch.no_grad():
        assert pruner.prune() is not None
    train(model, optimizer, (20,), 1)
