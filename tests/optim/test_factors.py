"""P in factors: what it is, what stays of it, and that rounding cannot break it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from reference.factors import ReferenceFactors
from reference.training import ReferenceRLS, closed_form_ridge, paper_loss
from rlsprune.optim import factors
from rlsprune.optim.entries import form_of, initial_entry, inverse_step
from rlsprune.optim.factored import Factored, capacity
from rlsprune.optim.packing import InverseState
from rlsprune.statistics.inverse import inverses_of

N, OUT, RANK, K = 40, 5, 8, 0.1


def mean_inputs(
    count: int, scale: float = 1.0, dtype: torch.dtype = torch.float64, groups: int = 1
) -> Iterator[Tensor]:
    """Like those of a layer: nearly the same vector every time, and a few directions in which it varies."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.rand(groups, N, generator=generator)
    spread = torch.randn(N, N, generator=generator) * torch.logspace(0, -2, N)[:, None] / N**0.5
    for _ in range(count):
        yield (scale * (centre + torch.randn(groups, N, generator=generator) @ spread)).to(dtype)


def gradient(groups: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, None]:
    return torch.randn(groups, OUT, N, generator=torch.Generator().manual_seed(1)).to(dtype), None


def step(entry: InverseState, x: Tensor, forgetting: float = 1.0, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of P; ``xᵀPx`` and ``∇W P`` before it."""
    gradients = gradient(len(x), x.dtype)
    inverse = inverse_step([[entry]])
    excitation, _ = inverse.look([x], K)
    assert (excitation > -1e-3).all()
    assert inverse.meet([gradients]).isfinite().all()
    velocity = torch.zeros_like(gradients[0])
    inverse.velocity_step_([(velocity, None)], 0.0, -torch.ones_like(excitation))
    inverse.update_(forgetting, 2.0, gate)
    return excitation / K, velocity


def factored(x: Tensor, rank: int = RANK, p0: float = 1.0) -> InverseState:
    entry = initial_entry(x, p0, rank)
    assert "C" in entry
    return entry


def form_in_factors(entry: InverseState) -> Factored:
    form = form_of(entry)
    assert isinstance(form, Factored)
    return form


def dense(entry: InverseState) -> Tensor:
    return form_of(entry).dense()


@pytest.mark.parametrize("p0", [1.0, 0.3])
@pytest.mark.parametrize("forgetting", [1.0, 0.97])
def test_it_is_the_slow_reference(forgetting: float, p0: float) -> None:
    """Exactly Eq. (16) until C is full, and a reference that drops the same directions from then on."""
    x = next(mean_inputs(1))
    entry, whole = factored(x, p0=p0), ReferenceRLS(nn.Linear(N, OUT, bias=False).double(), p0=p0)
    reference = ReferenceFactors(N, p0, RANK, capacity(RANK))
    P = whole.P[""]
    for t, x in enumerate(mean_inputs(60)):
        expected = reference.inverse()
        if t <= capacity(RANK) and forgetting == 1:
            torch.testing.assert_close(dense(entry)[0], P, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(dense(entry)[0], expected, rtol=1e-8, atol=1e-10)
        excitation, moved = step(entry, x, forgetting)
        torch.testing.assert_close(excitation[0], x[0] @ expected @ x[0], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(moved[0], gradient()[0][0] @ expected, rtol=1e-8, atol=1e-10)
        reference.update(x[0], K, forgetting, 2.0 / p0)
        u = P @ x[0]
        P = P - K / (1 + K * x[0] @ u) * torch.outer(u, u)
    assert reference.gained < 60


def test_ridge_regression_as_long_as_nothing_is_dropped() -> None:
    torch.manual_seed(0)
    steps = capacity(16)
    inputs = torch.randn(steps, 60, dtype=torch.float64)
    targets = inputs @ torch.randn(60, 2, dtype=torch.float64)
    layer = nn.Linear(60, 2).double()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = rlsprune.RLS(layer, lr=1.0, momentum=0.0, mean_scale=1.0)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        paper_loss(layer(x[None]), y[None]).backward()
        optimizer.step()
    ridge = closed_form_ridge(inputs, targets)
    torch.testing.assert_close(layer.weight.data, ridge.weight, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(layer.bias.data, ridge.bias, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(optimizer.inverse(""), ridge.P, rtol=1e-8, atol=1e-10)


def test_compression_keeps_the_strongest_directions_and_the_trace() -> None:
    C = torch.randn(3, 12, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    beta = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    turn, growth = factors.compress(factors.gram(C), torch.full((3, 1), N), RANK)
    strongest, after = turn @ C, beta * growth
    identity = torch.eye(N, dtype=torch.float64)
    A = beta[:, None, None] * (identity + C.mT @ C)
    B = after[:, None, None] * (identity + strongest.mT @ strongest)
    torch.testing.assert_close(*(matrix.diagonal(dim1=-2, dim2=-1).sum(-1) for matrix in (A, B)))
    energies = strongest.square().sum(-1)
    torch.testing.assert_close(strongest @ strongest.mT, torch.diag_embed(energies))
    top = torch.linalg.eigh(A)
    for group in range(3):
        vectors = top.eigenvectors[group, :, -RANK:]
        torch.testing.assert_close(vectors.T @ B[group] @ vectors, torch.diag(top.eigenvalues[group, -RANK:]))
    assert (strongest.sum(-1) != 0).all()
    assert (turn.gather(-1, turn.abs().argmax(-1, keepdim=True)) > 0).all()  # one sign for all libraries


@pytest.mark.parametrize("how", ["schur", "slice"])
@pytest.mark.parametrize("steps", [7, 31])
def test_what_stays_of_it_when_inputs_go(how: str, steps: int) -> None:
    entry = factored(next(mean_inputs(1, groups=2)))
    for x in mean_inputs(steps, groups=2):
        step(entry, x)
    gone = torch.tensor([[1, 5, 6, 30], [0, 2, 3, 39]])
    form = form_in_factors(entry)
    left = dense(form.sliced(gone) if how == "slice" else form.without(gone))
    for P, smaller, rows in zip(form.dense(), left, gone, strict=True):
        stay = [row for row in range(N) if row not in rows]
        expected = torch.linalg.inv(torch.linalg.inv(P)[stay][:, stay]) if how == "schur" else P[stay][:, stay]
        torch.testing.assert_close(smaller, expected, rtol=1e-9, atol=1e-11)


def test_pruning_asks_it_what_it_asks_the_whole_p() -> None:
    entry = factored(next(mean_inputs(1)))
    for x in mean_inputs(31):
        step(entry, x)
    (own,), P = inverses_of(form_of(entry)), dense(entry)[0]
    (whole,) = inverses_of(form_of({"P": P.unsqueeze(0)}))
    units, gone = torch.arange(N - 1).view(-1, 3), torch.tensor([2, 17, 30])
    weights = torch.randn(N, OUT, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(own.row_sums(N - 1), whole.row_sums(N - 1))
    torch.testing.assert_close(own.blocks(units), whole.blocks(units))
    torch.testing.assert_close(own.without(gone).refit(weights), whole.without(gone).refit(weights))
    torch.testing.assert_close(own.without(gone).left().row_sums(30), whole.without(gone).left().row_sums(30))


@pytest.mark.parametrize("forgetting", [1.0, 0.97])
def test_a_masked_step_adds_a_row_of_zeros(forgetting: float) -> None:
    """P is the same, and so is all that follows, but for the row's place."""
    first = next(mean_inputs(1))
    plain, masked = factored(first), factored(first)
    closed, opened = torch.tensor(False), torch.tensor(True)
    for t, x in enumerate(mean_inputs(40)):
        step(plain, x, forgetting)
        step(masked, x, forgetting, opened)
        torch.testing.assert_close(dense(masked), dense(plain), rtol=0, atol=0)
        if t == 5:
            before = dense(masked)
            step(masked, torch.full_like(x, 1e30), forgetting, closed)
            torch.testing.assert_close(dense(masked), before, rtol=1e-12, atol=1e-14)
            break
    assert masked["rows"] == plain["rows"] + 1


def test_forgetting_does_not_wind_up() -> None:
    """An input that is always zero keeps P below the limit, and the others forget."""
    entry = factored(next(mean_inputs(1)))
    for x in mean_inputs(600):
        x[:, 7] = 0
        step(entry, x, 0.99)
    P = dense(entry)[0]
    assert P[7, 7] == pytest.approx(2.0)
    assert torch.linalg.eigvalsh(P)[0] > 0
    forgotten = P.diagonal()[:7].clone()
    for x in mean_inputs(600):
        step(entry, 0 * x, 0.99)
    assert (dense(entry)[0].diagonal()[:7] > forgotten).all()
    assert dense(entry)[0].diagonal().max() <= 2.0 + 1e-9


@pytest.mark.parametrize("forgetting", [1.0, 0.999])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0, 1e4, 1e6])
def test_float32_agrees_with_float64_for_thousands_of_steps(scale: float, forgetting: float) -> None:
    """Of ``∇W P``: 200,000 steps are `benchmarks/quality/soak_inverse.py`'s."""
    entries = [factored(next(mean_inputs(1, scale, dtype))) for dtype in (torch.float32, torch.float64)]
    for t, (x, exact) in enumerate(zip(mean_inputs(1000, scale, torch.float32), mean_inputs(1000, scale), strict=True)):
        moved, expected = (step(entry, own, forgetting)[1] for entry, own in zip(entries, (x, exact), strict=True))
        if t > 100 and t % 100 == 0:  # before the first compressions, large inputs are told: see test_health
            assert (moved - expected).norm() < 1e-4 * expected.norm()
    eigenvalues, expected = (form_of(entry).eigenvalues() for entry in entries)
    assert eigenvalues.min() > 0
    torch.testing.assert_close(eigenvalues, expected, rtol=1e-3, atol=0)


def test_no_layer_is_too_wide() -> None:
    with torch.device("meta"):
        model = nn.Linear(25088, 4096)
        optimizer = rlsprune.RLS(model, lr=0.1)
    optimizer._faults.report = lambda wait=False: None
    model(torch.rand(2, 25088, device="meta")).sum().backward()
    optimizer.step()
    assert optimizer.memory_usage()["inverse"] < 5e6


@pytest.mark.parametrize(("inputs", "form"), [(47, "P"), (48, "C")])
def test_small_layers_keep_p_whole(inputs: int, form: str) -> None:
    layer = nn.Linear(inputs, 3)
    optimizer = rlsprune.RLS(layer)
    layer(torch.rand(2, inputs)).sum().backward()
    optimizer.step()
    assert form in optimizer.state[layer.weight]["inverse"]


def test_training_is_nearly_that_with_p_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 3))
    twin = copy.deepcopy(model)
    data = torch.rand(64, 60)
    target = (data[:, :3] - data[:, 3:6]).sigmoid()
    losses = []
    for network, rank in ((model, 16), (twin, None)):
        optimizer = rlsprune.RLS(network, lr=0.3, rank=rank)
        for batch in torch.randint(64, (150, 16), generator=torch.Generator().manual_seed(3)):
            optimizer.zero_grad()
            loss = (network(data[batch]) - target[batch]).square().mean()
            loss.backward()
            optimizer.step()
        losses.append((network(data) - target).square().mean().item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_form_survives_a_state_dict() -> None:
    """Whatever the rank of the optimizer that loads it; to the bit."""
    layer = nn.Linear(60, 3)
    optimizer = rlsprune.RLS(layer, lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        layer(torch.rand(4, 60)).square().mean().backward()
        optimizer.step()
    twin = copy.deepcopy(layer)
    loaded = rlsprune.RLS(twin, lr=0.1, rank=None)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(20):
        inputs = torch.rand(4, 60)
        for network, its_optimizer in ((layer, optimizer), (twin, loaded)):
            its_optimizer.zero_grad()
            network(inputs).square().mean().backward()
            its_optimizer.step()
    torch.testing.assert_close(twin.state_dict(), layer.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loaded.inverse(""), optimizer.inverse(""), rtol=0, atol=0)
    assert loaded.state[twin.weight]["inverse"]["rank"] == 16


@pytest.mark.parametrize(("rank", "steps"), [(16, 3000), (None, 300)])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_large_mean_inputs_that_hardly_vary_leave_p_definite(spread: float, rank: int | None, steps: int) -> None:
    """Full-batch training: all energy lies in one direction, and what P leaves of it is smaller than its rounding."""
    generator = torch.Generator().manual_seed(0)
    entry = initial_entry(torch.empty(1, 785), 1.0, rank)
    for number in range(steps):
        x = 50 + spread * torch.randn(1, 785, generator=generator)
        inverse = inverse_step([[entry]])
        assert float(inverse.look([x], K)[0]) > -1e-6, number
        inverse.update_(1.0, 2.0, None)
    assert form_of(entry).eigenvalues().min() > 0
    if rank is not None and not spread:
        energy = K * float(x.square().sum())
        excitation = inverse_step([[entry]]).look([x], K)[0]
        assert float(excitation) == pytest.approx(energy / (1 + steps * energy), rel=0.05)
