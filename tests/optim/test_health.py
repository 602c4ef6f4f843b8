"""Numerical health: faults change nothing, P stays symmetric and bounded, inputs that are too large are told."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import rlsprune
from reference.training import paper_loss
from rlsprune.optim.factored import capacity
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.layer_step import WIND_UP_LIMIT
from rlsprune.optim.team import share_checks


def snapshot(model: nn.Module, optimizer: rlsprune.RLS) -> object:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def break_input(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    inputs[1, 2] = float("nan")
    return model(inputs).square().mean()


def break_gradient(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean() * float("inf")


FAULTS = [(break_input, "the input of layer '0'"), (break_gradient, "the gradient of layer '0'")]


def prepared(on_fault: str, forgetting: float = 1.0, rank: int | None = 8) -> tuple[nn.Module, rlsprune.RLS]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = rlsprune.RLS(model, lr=0.1, on_fault=on_fault, forgetting=forgetting, rank=rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 30)).square().mean().backward()
        optimizer.step()
    model[1].eval()
    optimizer.zero_grad()
    return model, optimizer


def test_wide_layers_can_be_left_out_of_the_check() -> None:
    """But for those in factors, whose small matrix tells."""
    for rank, widest in ((None, 31), (8, 21)):  # inputs and the bias of layer 0, of layer 3
        _, optimizer = prepared("raise", rank=rank)
        assert set(optimizer.check()) == {"0", "3"}
        assert set(optimizer.check(at_most=widest)) == {"0", "3"}
        assert set(optimizer.check(at_most=widest - 1)) == ({"3"} if rank is None else {"0"})


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

    def now() -> object:
        """All but the number of rows in C, of which the masked step adds one of zeros."""
        velocities = [state["velocity"] for state in optimizer.state.values()]
        return copy.deepcopy((model.state_dict(), velocities, [optimizer.inverse(name) for name in ("0", "3")]))

    before = now()
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    monkeypatch.setattr("rlsprune.optim.recorder.host_waits", lambda device: True)
    fault(model, torch.rand(4, 30)).backward()
    optimizer.step()
    torch.testing.assert_close(now(), before, rtol=0, atol=0)
    with pytest.raises(FloatingPointError, match="of layer '0'"):
        optimizer.step()


@pytest.mark.parametrize(("name", "part"), [("3", "P"), ("0", "C"), ("0", "T")])
def test_where_the_host_does_not_wait_a_broken_p_harms_no_weight(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared("raise")
    optimizer.state[model.get_submodule(name).weight]["inverse"][part][0, 0, 0] = torch.nan
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    velocities = [state["velocity"].clone() for state in optimizer.state.values()]
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    model(torch.rand(4, 30)).square().mean().backward()
    optimizer.step()
    for own, parameter in model.named_parameters():
        assert torch.equal(parameter, before[own]), own
    for state, velocity in zip(optimizer.state.values(), velocities, strict=True):
        assert torch.equal(state["velocity"], velocity)
    with pytest.raises(FloatingPointError, match=f"of layer '{name}'"):
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
    ranks = SimpleNamespace(all_true=lambda ok: ok)
    flags = torch.ones(8, dtype=torch.bool)
    flags[6] = False
    checks = share_checks(ranks, [(lambda: [(i, f"layer {i}") for i in range(8)], flags)], torch.device("cpu"))
    with pytest.raises(FloatingPointError, match=r"^layer 6 \(and 1 more\)"):
        FaultWatch("raise").gates(checks)


def test_a_report_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    monkeypatch.setattr("rlsprune.optim.faults._Look.arrived", False)
    bad = [(lambda: [(0, "the loss"), (1, "the gradient")], torch.tensor([True, False]))]
    watch = FaultWatch("raise")
    gates = watch.gates(bad)
    assert gates is not None
    assert not gates[torch.device("cpu")]
    watch.report()
    with pytest.raises(FloatingPointError, match=r"^the gradient\."):
        watch.report(wait=True)
    # A host that runs far ahead waits in the end.
    for _ in range(16):
        watch.gates(bad)
        watch.report()
    watch.gates(bad)
    with pytest.raises(FloatingPointError, match=r"^the gradient\."):
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
    with pytest.raises(FloatingPointError, match=r"not positive definite: P of layer '3'"):
        optimizer.step()
    optimizer.reset("3")
    assert torch.equal(optimizer.inverse("3"), torch.eye(21))
    assert not torch.equal(optimizer.inverse("0"), torch.eye(31))
    optimizer.reset()
    assert torch.equal(optimizer.inverse("0"), torch.eye(31))
    optimizer.zero_grad()
    model(torch.rand(4, 30)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(optimizer.inverse("0"), torch.eye(31))
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


def test_memory_is_p_and_one_velocity_per_weight() -> None:
    _, optimizer = prepared("raise")
    parameters = 30 * 20 + 20 + 2 * 20 + 20 * 2 + 2
    rows = capacity(8)
    factors = 4 * rows * 31 + 8 * rows**2 + 8  # C in float32, T and β in float64
    expected = {"inverse": factors + 4 * 21**2, "velocity": 4 * parameters}
    assert optimizer.memory_usage() == expected | {"total": sum(expected.values())}
    leaves = tree_leaves(list(optimizer.state.values()))
    assert sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)) == sum(expected.values())


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_inputs_too_large_for_float32_are_told_in_that_step(scale: float, rank: int | None) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20, 2)
    optimizer = rlsprune.RLS(layer, lr=0.1, rank=rank)
    before = snapshot(layer, optimizer)
    layer(scale * torch.rand(8, 20)).square().mean().backward()
    with pytest.raises(FloatingPointError, match=r"too large for P in torch.float32 \(scale the inputs, .*float64\)"):
        optimizer.step()
    torch.testing.assert_close(layer.state_dict(), before[0])  # type: ignore[index]


@pytest.mark.parametrize(("scale", "dtype"), [(1e-6, torch.float32), (100.0, torch.float32), (1e6, torch.float64)])
def test_the_remedies_help(scale: float, dtype: torch.dtype) -> None:
    """Large inputs that pass, or larger ones with P in float64: a regression converges, and P stays sound."""
    torch.manual_seed(0)
    layer = nn.Linear(20, 2)
    optimizer = rlsprune.RLS(layer, momentum=0.0, mean_scale=1.0, dtype=dtype, rank=None)
    true, losses = torch.randn(2, 20), []
    for _ in range(400):
        inputs = scale * torch.rand(1, 20)
        optimizer.zero_grad()
        loss = paper_loss(layer(inputs), inputs @ true.T)
        losses.append(loss.item() / scale**2)
        loss.backward()
        optimizer.step()
    assert optimizer.check()[""].healthy
    if scale > 1:
        assert max(losses[-20:]) < 1e-4 * losses[0]
