"""Events of networks with batch norms: chosen in closed form, and refitted to the network before the event."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rlsprune
from rlsprune.prune import original
from rlsprune.reconstruction import recent
from rlsprune.reconstruction.norms import make_consistent
from rlsprune.reconstruction.recent import RecentInputs
from zoo import ZOO, evaluate, make_twin


class Residual(nn.Module):
    """A residual sum with batch norms in both branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv2, self.norm2 = nn.Conv2d(10, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return self.head((x + y).relu().mean((2, 3)))


def batch(seed: int, count: int = 64) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, steps: int = 6) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        model(batch(step).to(next(model.parameters()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def in_training(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the network computes in training mode; it stays as it is."""
    with torch.no_grad():
        return copy.deepcopy(model).train()(inputs)


@pytest.mark.parametrize("name", ["vgg-bn", "resnet-basic", "resnet-bottleneck", "densenet", "mobilenet"])
def test_redundant_channels_go_without_any_loss_in_either_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "rebuild", partial(original.rebuild, damping=1e-13))
    specimen = ZOO[name]
    model = specimen.model().double().train()
    inputs = [specimen.inputs(seed, batch=128).double() for seed in range(10, 14)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        specimen.inputs().double(),
        ratio=0.34,
        criterion=lambda group: [torch.arange(float(group.size))],
    )
    for group in pruner.groups:
        for unit in range(group.size // 3):
            make_twin(group, unit, of=group.size - 1 - unit)
    make_consistent(model, inputs)  # running statistics that do not lag behind
    pruner.calibrate(inputs)
    everything = torch.cat(inputs)
    fresh = specimen.inputs(99, batch=16).double()
    before, before_training = evaluate(model, fresh), in_training(model, everything)
    event = pruner.prune()
    assert event is not None
    torch.testing.assert_close(evaluate(model, fresh), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(in_training(model, everything), before_training, rtol=1e-4, atol=1e-5)


def test_a_shift_that_went_into_a_batch_norm_is_the_same_in_either_mode() -> None:
    whole = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 3)).double()
    norm = whole[1]
    generator = torch.Generator().manual_seed(0)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):  # statistics that lag far behind
        tensor.copy_(torch.randn(5, generator=generator))
    norm.running_var.copy_(torch.rand(5, generator=generator) + 0.5)
    whole.eval()
    cut, shift = copy.deepcopy(whole), torch.randn(5, generator=generator).double()
    cut[0].bias.data.sub_(shift)
    cut[1].bias.data.add_(shift * norm.weight.data / (norm.running_var + norm.eps).sqrt())
    inputs = batch(0).double()
    assert not torch.allclose(in_training(cut, inputs), in_training(whole, inputs))
    assert make_consistent(cut, [inputs[:40], inputs[40:]], before=whole) == []
    torch.testing.assert_close(evaluate(cut, inputs), evaluate(whole, inputs))
    torch.testing.assert_close(in_training(cut, inputs), in_training(whole, inputs))


def test_an_event_changes_the_network_less_than_the_refit_of_each_layer_alone() -> None:
    errors = {}
    for inputs_are_kept in (False, True):
        model = Residual()
        optimizer = trained(model, 20)
        pruner = rlsprune.Pruner(model, optimizer, batch(0, 1), ratio=0.5)
        pruner.calibrate([batch(seed) for seed in range(50, 58)])
        if not inputs_are_kept:
            pruner._operation.evidence.recent.clear()
        before = evaluate(model, batch(99))
        with contextlib.nullcontext() if inputs_are_kept else pytest.warns(UserWarning, match="layer by layer"):
            event = pruner.prune()
        assert event is not None
        assert event.refit == ("whole" if inputs_are_kept else "layers")
        errors[inputs_are_kept] = float((evaluate(model, batch(99)) - before).square().mean() / before.var())
    assert errors[True] < 0.7 * errors[False]


def test_the_optimizer_the_copies_and_the_mode_go_along_and_training_goes_on() -> None:
    model = Residual()
    optimizer = trained(model)
    average = AveragedModel(model)
    momentum = optimizer.state[model.head.weight]["momentum_buffer"].clone()
    pruner = rlsprune.Pruner(model, optimizer, batch(0, 1), ratio=0.5, warmup_epochs=0, patience=1)
    pruner.follow(average)
    model(batch(7)).square().mean().backward()
    whole, whole_average = copy.deepcopy(model.state_dict()), copy.deepcopy(average.module.state_dict())
    before = evaluate(average, batch(8))
    event = pruner.step(1.0)
    assert event is not None
    assert model.training
    stay = [channel for channel in range(8) if channel not in event.removed.get("stem", [])]
    assert torch.equal(optimizer.state[model.head.weight]["momentum_buffer"], momentum[:, stay])
    after = evaluate(average, batch(8))
    assert float((after - before).square().mean()) < 0.3 * float(before.var())
    for parameter in model.parameters():
        state = optimizer.state[parameter]["momentum_buffer"]
        assert state.shape == parameter.shape
    assert pruner.step(2.0) is None  # patience is over: rolled back
    assert pruner.history[-1].kind == "roll-back"
    for now, then in ((model.state_dict(), whole), (average.module.state_dict(), whole_average)):
        assert all(torch.equal(now[name], then[name]) for name in then)


def test_a_preview_and_an_error_leave_the_statistics_of_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Residual()
    pruner = rlsprune.Pruner(model, trained(model), batch(0, 1), ratio=0.5)
    pruner.calibrate([batch(1)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert pruner.preview() is not None
    consistent = original.make_consistent

    def fail(*args: Any, **kwargs: Any) -> list[str]:
        consistent(*args, **kwargs)
        raise MemoryError("out of memory")

    monkeypatch.setattr(original, "make_consistent", fail)
    with pytest.raises(MemoryError):
        pruner.prune()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_as_much_is_saved_as_by_the_ratio_of_every_layer() -> None:
    saved = {}
    for criterion in ("obs", "l1"):
        model = ZOO["resnet-basic"].model()
        pruner = rlsprune.Pruner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ZOO["resnet-basic"].inputs(),
            ratio=0.25,
            criterion=criterion,
        )
        pruner.calibrate([ZOO["resnet-basic"].inputs(1, batch=64)])
        event = pruner.prune()
        saved[criterion] = 2 - event.params_after / event.params_before - event.flops_after / event.flops_before
    assert saved["obs"] == pytest.approx(saved["l1"], abs=0.1)


def test_ratios_of_layers_rounding_and_least_widths_hold() -> None:
    def widths(**settings: Any) -> tuple[int, int]:
        model = Residual()
        pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(0, 1), **settings)
        pruner.calibrate([batch(1)])
        pruner.prune()
        return model.stem.out_channels, model.conv1.out_channels

    assert widths(ratio={"conv1": 0.3}) == (8, 7)
    assert widths(ratio=0.5, round_to=4) in {(8, 4), (4, 8), (4, 4)}
    stem, inner = widths(ratio=0.6, min_channels=5)
    assert min(stem, inner) >= 5


def test_what_the_target_counts_is_saved() -> None:
    def event(criterion: str, what: str) -> rlsprune.PruneEvent:
        specimen = ZOO["resnet-basic"]
        model = specimen.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"ratio": 0.25, "criterion": criterion, "target": {what: 0.05}}
        pruner = rlsprune.Pruner(model, optimizer, specimen.inputs(), **settings)
        pruner.calibrate([specimen.inputs(1, batch=64)])
        done = pruner.prune()
        assert done is not None
        return done

    every_layer, params, flops = event("l1", "flops"), event("obs", "params"), event("obs", "flops")
    assert params.params_after < every_layer.params_after
    assert flops.flops_after < every_layer.flops_after < params.flops_after


@pytest.mark.parametrize("what", ["params", "flops"])
@pytest.mark.parametrize("name", ["resnet-basic", "resnet-bottleneck", "vgg-bn"])
def test_the_last_event_removes_hardly_more_than_the_target_asks_for(name: str, what: str) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, specimen.inputs(), ratio=0.4, target={what: 0.9})
    pruner.calibrate([specimen.inputs(1, batch=64)])
    event = pruner.prune()
    assert event is not None
    left = getattr(event, f"{what}_after") / getattr(event, f"{what}_before")
    assert 0.87 < left <= 0.9  # a channel is up to 3 % of such a network


class DataDependent(nn.Module):
    """Calls another layer for inputs that are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extra = nn.Linear(4, 4)
        self.first, self.norm, self.last = nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.extra(x) if float(x.mean()) > 0.5 else x
        return self.last(self.norm(self.first(x)).relu())


def test_a_network_that_calls_other_layers_for_other_inputs_is_refitted_layer_by_layer() -> None:
    model = DataDependent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.zeros(1, 4), ratio=0.5, input_ratio=0)
    inputs = torch.rand(64, 4) - 1
    pruner.calibrate([torch.rand(64, 4) + 1, inputs])
    before = evaluate(model, inputs)
    with pytest.warns(UserWarning, match=r"an event was refitted layer by layer.*calls different layers"):
        event = pruner.prune()
    assert event is not None
    assert event.refit == "layers"
    assert "refitted layer by layer" in str(event)
    assert model.first.out_features == 6
    error = evaluate(model, inputs) - before
    assert float(error.square().mean()) < 0.2 * float(before.var())


# --- the inputs that are kept -----------------------------------------------------------------------------------------


def kept(inputs: RecentInputs) -> list[Tensor]:
    return [call[0] for call in inputs.calibration().calls]  # type: ignore[index]


def test_the_last_training_inputs_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_INPUTS", 10)
    model = nn.Linear(2, 2)
    statistics = rlsprune.InputStatistics(model)
    inputs = RecentInputs(model, statistics.watches)
    batches = [torch.full((4, 2), float(number)) for number in range(6)]
    for given in batches:
        model(given)
        given.fill_(-1)  # a loader may use its memory again
    assert [float(call[0, 0]) for call in kept(inputs)] == [4, 5]
    model(torch.full((64, 2), 7.0))
    assert [tuple(call.shape) for call in kept(inputs)] == [(10, 2)]
    inputs.clear()
    model.eval()(batches[0])
    with torch.no_grad():
        model.train()(batches[0])
    statistics.active = False
    model(batches[0])
    with pytest.raises(ValueError, match="none of its forwards was seen"):
        kept(inputs)
    with statistics.everything():
        model.eval()(batches[0])
    assert len(kept(inputs)) == 1
    inputs.close()
    assert not model._forward_pre_hooks


def test_memory_is_bounded_whatever_an_input_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_BYTES", 4000)
    model = nn.Linear(100, 2)
    inputs = RecentInputs(model, lambda model: True)
    for _ in range(4):
        model(torch.rand(8, 100))
    assert 0 < sum(call.nbytes for call in kept(inputs)) <= 4000


def test_calls_that_cannot_be_made_again_are_not_kept() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor, extra: object = None) -> Tensor:
            return super().forward(x)

    model = Odd(2, 2)
    inputs = RecentInputs(model, lambda model: True)
    for args, kwargs in (((torch.rand(4, 2),), {"extra": object()}), ((torch.rand(4, 2), object()), {})):
        model(*args, **kwargs)
        with pytest.raises(ValueError, match="neither tensors nor numbers"):
            inputs.calibration()
        inputs.clear()
    model(x=torch.rand(4, 2))
    model(torch.rand(4, 2), object())  # not kept, others are
    assert len(inputs.calibration().calls) == 1
    model(torch.rand(4, 2), extra=1.0)
    assert [sorted(call) for call in inputs.calibration().calls] == [["x"], ["extra", "x"]]


def test_calls_are_not_named_where_a_hook_of_the_user_looks_at_their_places() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    model = Scaled(2, 2)
    inputs = RecentInputs(model, lambda model: True)
    model(torch.rand(4, 2), scale=2.0)
    assert sorted(inputs.calibration().calls[0]) == ["scale", "x"]
    inputs.clear()
    model.register_forward_pre_hook(lambda module, args: tuple(own + 1 for own in args))
    model(torch.rand(4, 2), scale=2.0)
    with pytest.raises(ValueError, match="its calls have"):
        inputs.calibration()


@pytest.mark.parametrize("compiled", [False, True])
def test_calibration_shows_inputs_to_compiled_networks_too(compiled: bool) -> None:
    model = Residual()
    optimizer = trained(model)
    pruner = rlsprune.Pruner(model, optimizer, batch(0, 1), ratio=0.3)
    if compiled:
        model.compile(backend="eager")
    model(batch(1)).sum().backward()
    pruner.calibrate([batch(2), batch(3)])
    event = pruner.prune()
    assert event is not None
    assert event.refit == "whole"


def test_networks_without_batch_norms_keep_no_inputs() -> None:
    for model, keeps in ((ZOO["vgg-bn"].model(), True), (ZOO["vgg"].model(), False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain: dict[str, Any] = {"compensate": False, "criterion": "l1"}
        for settings, allowed in (({}, True), (plain, False)):
            pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, *ZOO["vgg"].shape[1:]), **settings)
            assert (pruner._operation.evidence.recent is not None) == (keeps and allowed)
            pruner.close()
            assert not model._forward_pre_hooks


@pytest.mark.parametrize("options", [{"input_ratio": 0}, {"ratio": {"0": 0.3}}], ids=["input_ratio", "mapping"])
def test_flat_inputs_that_are_left_alone_stay(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.randn(1, 8), **{"ratio": 0.3, **options})
    pruner.calibrate([torch.randn(64, 8)])
    event = pruner.prune()
    assert event is not None
    assert {name: len(units) for name, units in event.removed.items()} == {"0": 6}


class OnGraphs(nn.Module):
    """Nodes, and edges that name them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Linear(12, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        outputs = self.head(self.norm(self.first(nodes)).relu())
        return outputs.index_add(0, edges[1], outputs[edges[0]])


def test_calls_of_which_no_part_can_be_taken_are_refitted_layer_by_layer() -> None:
    model = OnGraphs()
    call = torch.randn(700, 4), torch.randint(700, (2, 900))
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), call, ratio=0.3)
    for _ in range(2):
        model(*call).square().mean().backward()
    with pytest.warns(UserWarning, match=r"refitted layer by layer.*tensors of different lengths"):
        event = pruner.prune()
    assert event is not None
    assert model.first.out_features == 9


def test_inputs_are_kept_before_hooks_of_the_user_and_empty_batches_are_not() -> None:
    model = nn.BatchNorm1d(3)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    inputs = RecentInputs(model, lambda module: True)
    model(torch.zeros(4, 3))
    model.eval()(torch.zeros(0, 3))
    assert [tensor.tolist() for tensor in kept(inputs)] == [torch.zeros(4, 3).tolist()]


class Noisy(Residual):
    """Counts its forwards, and draws noise in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x + 1e-3 * torch.randn_like(x))


def test_a_preview_draws_no_random_numbers_and_writes_to_no_buffer() -> None:
    model = Noisy()
    pruner = rlsprune.Pruner(model, trained(model), batch(0, 1), ratio=0.3)
    pruner.calibrate([batch(seed) for seed in range(4)])
    forwards, state = model.forwards.item(), torch.get_rng_state()
    assert pruner.preview() is not None
    assert model.forwards.item() == forwards
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_that_does_not_run_on_the_inputs_does_not_spoil_the_network() -> None:
    weights = []
    for dtype in (torch.float32, torch.float64):
        model = Residual()
        optimizer = trained(model)
        pruner = rlsprune.Pruner(model, optimizer, batch(0, 1), ratio=0.3)
        pruner.follow(AveragedModel(model).to(dtype))
        pruner.calibrate([batch(seed) for seed in range(4)])
        pruner.prune()
        weights.append(model.head.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])


def test_inputs_that_are_not_finite_are_told_by_layer() -> None:
    model = Residual()
    optimizer = trained(model)
    pruner = rlsprune.Pruner(model, optimizer, batch(0, 1), ratio=0.3)
    model(batch(0).fill_(float("nan"))).sum().backward()
    with pytest.raises(FloatingPointError, match=r"the input of layer '\w+' is not finite"):
        pruner.prune()
