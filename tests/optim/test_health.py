"""Numerical health: faults change nothing, P stays symmetric and bounded, wide layers stay affordable."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rlsprune
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.layer_step import WIND_UP_LIMIT, block_sizes
from rlsprune.optim.team import Team


def snapshot(model: nn.Module, optimizer: rlsprune.RLS) -> object:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def break_input(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    inputs[1, 2] = float("nan")
    return model(inputs).square().mean()


def break_gradient(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean() * float("inf")


FAULTS = [(break_input, "the input of layer '0'"), (break_gradient, "the gradient of layer '0'")]


def prepared(on_fault: str, forgetting: float = 1.0) -> tuple[nn.Module, rlsprune.RLS]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = rlsprune.RLS(model, lr=0.1, on_fault=on_fault, forgetting=forgetting)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 30)).square().mean().backward()
        optimizer.step()
    model[1].eval()
    optimizer.zero_grad()
    return model, optimizer


def test_wide_layers_can_be_left_out_of_the_check() -> None:
    _, optimizer = prepared("raise")
    assert set(optimizer.check()) == {"0", "3"}
    assert set(optimizer.check(at_most=31)) == {"0", "3"}  # 30 inputs and the bias
    assert set(optimizer.check(at_most=30)) == {"3"}


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_fault_raises_and_changes_nothing(fault: object, message: str) -> None:
    model, optimizer = prepared("raise")
    before = snapshot(model, optimizer)
    fault(model, torch.rand(4, 30)).backward()
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)
    optimizer.zero_grad()
    model(torch.rand(4, 30)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_fault_is_skipped_with_a_warning(fault: object, message: str) -> None:
    model, optimizer = prepared("skip")
    before = snapshot(model, optimizer)
    fault(model, torch.rand(4, 30)).backward()
    with pytest.warns(UserWarning, match=f"step skipped.*{message}") as told:
        optimizer.step()
    assert told[0].filename == __file__, "it points at the line that took the step"
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS])
def test_where_the_host_does_not_wait_a_fault_is_masked_and_reported_later(
    fault: object, forgetting: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared("raise", forgetting)
    before = snapshot(model, optimizer)
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    monkeypatch.setattr("rlsprune.optim.recorder.host_waits", lambda device: True)
    fault(model, torch.rand(4, 30)).backward()
    optimizer.step()
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)
    with pytest.raises(FloatingPointError, match="of layer '0'"):
        optimizer.step()


@pytest.mark.parametrize("way", ["batch", "direct"])
def test_where_the_host_does_not_wait_a_broken_p_harms_no_weight(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("raise")
    optimizer.inverse("3")[0, 0] = torch.nan
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    velocities = [state["velocity"].clone() for state in optimizer.state.values()]
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    model(torch.rand(4, 30)).square().mean().backward()
    if way == "direct":
        model[3].weight.grad[0, 0] += 1  # no longer the product of inputs and deltas
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for state, velocity in zip(optimizer.state.values(), velocities, strict=True):
        assert torch.equal(state["velocity"], velocity)
    with pytest.raises(FloatingPointError, match="of layer '3'"):
        optimizer.check()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.01}, {"forgetting": 0.99}])
def test_where_the_host_does_not_wait_the_numbers_are_the_same(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 too, where a number must not become a float32 on its way."""
    results = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2)).double()
        optimizer = rlsprune.RLS(model, lr=0.1, **options)
        with monkeypatch.context() as patch:
            if waits:
                patch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.rand(4, 30, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("call", ["step", "report_faults"])
def test_a_warning_that_comes_later_points_at_the_line_that_gets_it(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("skip")
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    break_input(model, torch.rand(4, 30)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="step skipped") as told:
        getattr(optimizer, call)()
    assert told[0].filename == __file__


def test_the_rank_that_has_the_fault_names_it() -> None:
    """And not "something on another rank", which is told on all others."""
    team = Team.__new__(Team)
    team.ranks, team._owners, team.fsdp = SimpleNamespace(all_true=lambda ok: ok), {}, False
    flags = torch.ones(8, dtype=torch.bool)
    flags[6] = False
    checks = team.share_checks([([(i, f"layer {i}") for i in range(8)], flags)], torch.device("cpu"))
    with pytest.raises(FloatingPointError, match=r"not finite: layer 6 \(and 1 more\)"):
        FaultWatch("raise").gates(checks)


def test_a_report_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    monkeypatch.setattr("rlsprune.optim.faults._Look.arrived", False)
    bad = [([(0, "the loss"), (1, "the gradient")], torch.tensor([True, False]))]
    watch = FaultWatch("raise")
    gates = watch.gates(bad)
    assert gates is not None
    assert not gates[torch.device("cpu")]
    watch.report()
    with pytest.raises(FloatingPointError, match="not finite: the gradient"):
        watch.report(wait=True)
    # A host that runs far ahead waits in the end.
    for _ in range(16):
        watch.gates(bad)
        watch.report()
    watch.gates(bad)
    with pytest.raises(FloatingPointError, match="not finite: the gradient"):
        watch.report()
    assert pickle.loads(pickle.dumps(watch)).on_fault == "raise"


def test_the_masked_step_is_the_plain_step_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("raise", 0.99)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    inputs = torch.rand(4, 30)
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        if m is twin:
            monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
        m(inputs).square().mean().backward()
        o.step()
    torch.testing.assert_close(snapshot(model, optimizer), snapshot(twin, twin_optimizer))


def test_a_p_that_lost_its_sign_is_named_and_can_be_reset() -> None:
    model, optimizer = prepared("raise")
    optimizer.inverse("3").neg_().mul_(100)
    assert not optimizer.check()["3"].healthy
    model(torch.rand(4, 30)).square().mean().backward()
    with pytest.raises(FloatingPointError, match=r"P .* of layer '3'"):
        optimizer.step()
    optimizer.reset("3")
    assert torch.equal(optimizer.inverse("3"), torch.eye(21))
    assert not torch.equal(optimizer.inverse("0"), torch.eye(31))
    optimizer.reset()
    assert torch.equal(optimizer.inverse("0"), torch.eye(31))
    with pytest.raises(KeyError, match="'nowhere'"):
        optimizer.reset("nowhere")


def test_large_finite_half_precision_gradients_are_no_fault() -> None:
    layer = nn.Linear(64, 64).half()
    optimizer = rlsprune.RLS(layer, lr=1e-6)
    layer(torch.rand(2, 64).half()).sum().backward()
    layer.weight.grad.fill_(2000.0)  # the sum is beyond half precision
    optimizer.step()


@pytest.mark.parametrize("size", [1, 7, 64, 129, 785])
@pytest.mark.parametrize("forgetting", [1.0, 0.97])
def test_p_is_exactly_symmetric(size: int, forgetting: float) -> None:
    torch.manual_seed(size)
    layer = nn.Linear(size, 2)
    optimizer = rlsprune.RLS(layer, lr=0.01, forgetting=forgetting)
    for _ in range(30):
        optimizer.zero_grad()
        layer(torch.rand(4, size)).sum().backward()
        optimizer.step()
    P = optimizer.inverse("")
    assert torch.equal(P, P.T)
    assert optimizer.check()[""].healthy


def test_inputs_that_are_always_zero_do_not_wind_p_up() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(10, 1)
    optimizer = rlsprune.RLS(layer, lr=1e-3, forgetting=0.9)
    mask = (torch.arange(10) < 6).float()
    for _ in range(2000):
        optimizer.zero_grad()
        layer(torch.rand(4, 10) * mask).square().mean().backward()
        optimizer.step()
    P = optimizer.inverse("")
    assert optimizer.check()[""].healthy
    assert P.diagonal().max() <= WIND_UP_LIMIT * (1 + 1e-4)
    assert P[:6, 6:10].abs().max() == 0


def test_live_inputs_forget_as_if_the_dead_ones_were_not_there() -> None:
    inverses = []
    for dead in (0, 4):
        torch.manual_seed(0)
        layer = nn.Linear(6 + dead, 1, bias=False).double()
        torch.manual_seed(1)
        optimizer = rlsprune.RLS(layer, lr=1e-3, forgetting=0.9)
        for _ in range(300):
            optimizer.zero_grad()
            layer(nn.functional.pad(torch.rand(4, 6).double(), (0, dead))).square().mean().backward()
            optimizer.step()
        inverses.append(optimizer.inverse("")[:6, :6])
    torch.testing.assert_close(*inverses)


def test_check_tells_a_layers_spectrum() -> None:
    _, optimizer = prepared("raise")
    P = optimizer.inverse("0").double()
    health = optimizer.check()["0"]
    eigenvalues = torch.linalg.eigvalsh(P)
    assert health.smallest_eigenvalue == pytest.approx(eigenvalues[0].item())
    assert health.largest_eigenvalue == pytest.approx(eigenvalues[-1].item())
    assert health.trace == pytest.approx(P.trace().item())
    assert "ok" in str(health)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((10, 1, True, None), [11]),
        ((10, 1, False, 4), [4, 3, 3]),
        ((10, 1, True, 4), [4, 3, 4]),
        ((36, 9, True, 20), [18, 19]),
        ((36, 9, False, 5), [9, 9, 9, 9]),
    ],
)
def test_blocks_are_even_and_hold_whole_channels(
    arguments: tuple[int, int, bool, int | None], sizes: list[int]
) -> None:
    assert block_sizes(*arguments) == sizes


def test_each_block_is_the_inverse_autocorrelation_of_its_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    optimizer = rlsprune.RLS(model, lr=0.1, block_size=18)
    autocorrelation = torch.eye(37).double()
    for _ in range(20):
        images = torch.rand(5, 4, 4, 4).double()
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        x = nn.functional.pad(nn.functional.unfold(images, 3).mean((0, 2)), (0, 1), value=1.0)
        autocorrelation += 0.1 * torch.outer(x, x)
    P = optimizer.inverse("0")
    for part in (slice(0, 18), slice(18, 37)):
        torch.testing.assert_close(P[part, part], torch.linalg.inv(autocorrelation[part, part]))
    assert P[:18, 18:].abs().max() == 0


def test_one_block_as_large_as_the_layer_is_the_layer() -> None:
    models = []
    for block_size in (None, 30):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 2))
        optimizer = rlsprune.RLS(model, block_size=block_size)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.rand(4, 30)).square().mean().backward()
            optimizer.step()
        models.append(model.state_dict())
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


def test_blocks_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = rlsprune.RLS(model, block_size=7, lr=0.5)
    inputs = torch.rand(64, 30)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    assert optimizer.memory_usage()["inverse"] == 4 * (3 * 6**2 + 1 * 6**2 + 7**2 + 7**2 * 2 + 7**2)


def test_memory_is_p_and_one_velocity_per_weight() -> None:
    _, optimizer = prepared("raise")
    parameters = 30 * 20 + 20 + 2 * 20 + 20 * 2 + 2
    expected = {"inverse": 4 * (31**2 + 21**2), "velocity": 4 * parameters}
    assert optimizer.memory_usage() == expected | {"total": sum(expected.values())}
    held = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        for tensor in (value if isinstance(value, list) else [value])
    )
    assert held == sum(expected.values())


def test_a_layer_too_wide_for_n_squared_is_named_with_the_remedy() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(25088, 4096), nn.Linear(4096, 10))
    with pytest.warns(UserWarning, match=r"layer '0' \(25089 inputs\) takes 2\.3 GiB.*block_size") as caught:
        rlsprune.RLS(model)
    assert len(caught) == 1
    rlsprune.RLS(model, block_size=4096)
