"""The order in which units go, and what that costs, against least squares done anew for every candidate."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph import find_groups
from rlsprune.prune.allocation import Costs
from rlsprune.prune.elimination import Curve, FixedScores, Reader, ReaderInRows, eliminate
from rlsprune.prune.widths import choose_widths
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.shrinking.closed_form import ClosedForm
from rlsprune.statistics.inverse import from_rows


def error(A: Tensor, W: Tensor, stay: list[int]) -> float:
    """Of the best fit of XW from some of the inputs, by A = XᵀX/m: ``tr(WᵀAW) − tr(CᵀA_kk⁻¹C)`` with C = A_k·W."""
    C = (A @ W)[stay]
    return float((W * (A @ W)).sum() - (C * torch.linalg.solve(A[stay][:, stay], C)).sum())


def by_hand(readers: list[tuple[Tensor, Tensor, Tensor]], size: int) -> Curve:
    alive, order, costs = list(range(size)), [], [0.0]

    def total(units: list[int]) -> float:
        return sum(error(A, W, sorted(set(range(len(A))) - gone(index, units))) for A, W, index in readers)

    def gone(index: Tensor, units: list[int]) -> set[int]:
        return {int(row) for unit in range(size) if unit not in units for row in index[unit]}

    while len(alive) > 1:
        costs_now = {unit: total([other for other in alive if other != unit]) for unit in alive}
        unit = min(costs_now, key=costs_now.__getitem__)
        alive.remove(unit)
        order.append(unit)
        costs.append(costs_now[unit])
    return Curve([*order, *alive], costs)


def problem(inputs: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = (
        torch.randn(4 * inputs, inputs, generator=generator).double()
        @ torch.randn(inputs, inputs, generator=generator).double()
    )
    return X.T @ X / len(X), torch.randn(inputs, outputs, generator=generator).double()


def test_each_unit_goes_where_least_squares_says() -> None:
    # Two layers read the units: one with three inputs each (and a bias), one with one input each.
    A, W = problem(19, 5, 0)
    B, V = problem(6, 4, 1)
    first, second = torch.arange(18).view(6, 3), torch.arange(6).view(6, 1)
    curve = eliminate([Reader(A[None], W[None], first[None]), Reader(B[None], V[None], second[None])], 6)
    wanted = by_hand([(A, W, first), (B, V, second)], 6)
    assert curve.order == wanted.order
    assert curve.costs == pytest.approx(wanted.costs, rel=1e-8)


def test_groups_of_a_convolution_add_up() -> None:
    (A, W), (B, V) = problem(4, 2, 2), problem(4, 2, 3)
    index = torch.arange(4).view(4, 1)
    curve = eliminate([Reader(torch.stack([A, B]), torch.stack([W, V]), index.expand(2, 4, 1))], 4)
    wanted = by_hand([(A, W, index), (B, V, index)], 4)
    assert curve.order == wanted.order
    assert curve.costs == pytest.approx(wanted.costs, rel=1e-8)


def test_in_the_space_of_rows_it_is_the_same() -> None:
    torch.manual_seed(0)
    rows, W, index = torch.randn(20, 30).double(), torch.randn(30, 3).double(), torch.arange(30).view(10, 3)
    A = rows.T @ rows / 20 + 0.1 * rows.square().mean() * torch.eye(30).double()
    inside, outside = ReaderInRows(from_rows(rows, 0.1), W, index, rows), Reader(A[None], W[None], index[None])
    for gone in ([3], [0, 9], [5, 6]):
        left = [unit for unit in range(10) if unit not in gone]
        inside.remove(torch.tensor(gone))
        outside.remove(torch.tensor(gone))
        ours, wanted = inside.scores(), outside.scores()
        index_left = inside._left
        torch.testing.assert_close(ours[index_left], wanted[index_left])
        assert set(gone).isdisjoint(index_left.tolist())
        assert set(index_left.tolist()) <= set(left)


def test_error_is_that_on_other_rows() -> None:
    (A, W), (B, _), index = problem(40, 60, 4), problem(40, 1, 5), torch.arange(40).view(20, 2)
    reader = Reader(A[None].clone(), W[None], index[None], B[None].clone())
    units = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    for gone in range(0, 18, 3):
        reader.remove(units[gone : gone + 3])
        stay = index[units[gone + 3 :]].flatten()
        refitted = torch.zeros_like(W)
        refitted[stay] = torch.linalg.solve(A[stay][:, stay], (A @ W)[stay])
        assert reader.error == pytest.approx(float(((W - refitted) * (B @ (W - refitted))).sum()), rel=1e-8)


def test_in_the_space_of_rows_the_error_is_that_on_other_rows() -> None:
    torch.manual_seed(0)
    rows, others, W, index = torch.randn(20, 30), torch.randn(9, 30), torch.randn(30, 3), torch.arange(30).view(10, 3)
    rows, others, W = rows.double(), others.double(), W.double()
    A = rows.T @ rows / 20 + 0.1 * rows.square().mean() * torch.eye(30).double()
    inside = ReaderInRows(from_rows(rows, 0.1), W, index, others)
    outside = Reader(A[None], W[None], index[None], (others.T @ others / 9)[None])
    for gone in ([3], [0, 9], [5, 6]):
        inside.remove(torch.tensor(gone))
        outside.remove(torch.tensor(gone))
        assert inside.error == pytest.approx(outside.error)


def test_with_few_inputs_channels_do_not_stand_in_for_others_unless_they_are_copies() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 5))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter[48:] = parameter[:16]
    inputs, others = torch.randn(80, 32), torch.randn(4000, 32)
    curve = ClosedForm(model, inputs[:1], Calibration([inputs], [80]), ignore=["input"]).curves["0"]
    assert {unit % 48 for unit in curve.order[:16]} == set(range(16)), "the copies go first"
    assert curve.costs[16] < 0.01
    hidden, fresh = (
        torch.nn.functional.pad(model[:2](x), (0, 1), value=1.0).double().detach() for x in (inputs, others)
    )
    outputs, told = model(inputs).double().detach(), model(others).double().detach()
    for gone in (24, 32, 40):
        stay = [*curve.order[gone:], 64]
        fitted = torch.linalg.lstsq(hidden[:64][:, stay], outputs[:64]).solution

        def share(rows: Tensor, wanted: Tensor, stay: list[int] = stay, fitted: Tensor = fitted) -> float:
            return float((rows[:, stay] @ fitted - wanted).square().sum(1).mean() / wanted.var(0).sum())

        assert share(hidden[:64], outputs[:64]) < 0.5 * share(fresh, told), "the fit flatters itself"
        assert 0.5 * share(fresh, told) < curve.costs[gone] < 2 * share(fresh, told)


def test_fixed_scores_go_from_the_least() -> None:
    curve = eliminate([FixedScores(torch.tensor([3.0, 1.0, 2.0]))], 3)
    assert curve == Curve([1, 2, 0], [0.0, 1.0, 3.0])


def test_widths_are_the_best_of_all_that_meet_the_goal() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    groups = [group for group in find_groups(model, torch.randn(2, 3)) if not group.is_input]
    tensors = {name: float(parameter.numel()) for name, parameter in model.named_parameters()}
    costs = Costs(tensors, groups)
    curves = {
        "0": Curve(list(range(6)), [0, 0.1, 0.3, 0.7, 1.5, 3.0]),
        "2": Curve(list(range(5)), [0, 0.2, 0.5, 1.1, 2.6]),
    }
    for goal in (70, 55, 40, 25):
        gone = choose_widths(curves, groups, costs, goal, least=1, round_to=1)
        spent = costs.without({"0": gone["0"] / 6, "2": gone["2"] / 5})
        assert spent <= goal
        found = curves["0"].costs[gone["0"]] + curves["2"].costs[gone["2"]]
        best = min(
            curves["0"].costs[a] + curves["2"].costs[b]
            for a, b in itertools.product(range(6), range(5))
            if costs.without({"0": a / 6, "2": b / 5}) <= goal
        )
        assert found <= 1.35 * best + 1e-9, goal


def test_no_more_goes_than_the_goal_asks_for_where_errors_do_not_grow() -> None:
    model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    groups = [group for group in find_groups(model, torch.randn(2, 3)) if not group.is_input]
    costs = Costs({name: float(p.numel()) for name, p in model.named_parameters()}, groups)
    curves = {group.name: Curve(list(range(group.size)), [0.0] + [1.0] * (group.size - 1)) for group in groups}
    goal = 0.7 * costs.without({})
    gone = choose_widths(curves, groups, costs, goal, least=1, round_to=1)
    shares = {group.name: gone[group.name] / group.size for group in groups}
    assert costs.without(shares) <= goal
    for group in groups:
        if gone[group.name]:
            assert costs.without({**shares, group.name: shares[group.name] - 1 / group.size}) > goal


def test_widths_keep_multiples_and_a_goal_out_of_reach_takes_all_that_may_go() -> None:
    model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    groups = [group for group in find_groups(model, torch.randn(2, 3)) if not group.is_input]
    costs = Costs({name: float(p.numel()) for name, p in model.named_parameters()}, groups)
    curves = {group.name: Curve(list(range(group.size)), [float(i) for i in range(group.size)]) for group in groups}
    assert choose_widths(curves, groups, costs, 0.0, least=3, round_to=4) == {"0": 8, "2": 4}
    gone = choose_widths(curves, groups, costs, 100.0, least=1, round_to=4)
    assert gone["0"] % 4 == 0
    assert gone["2"] % 4 == 0
    assert choose_widths(curves, groups, costs, math.inf, least=1, round_to=1) == {"0": 0, "2": 0}


def test_errors_count_less_where_an_input_has_more_places() -> None:
    """Images of 16 equal pixels give the rows of images of one pixel, and the fourth root of 16 is 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1))
    pixels = torch.randn(200, 6, 1, 1)
    one, many = (
        ClosedForm(copy.deepcopy(model), inputs[:1], Calibration([inputs], [200])).curves["0"]
        for inputs in (pixels, pixels.expand(-1, -1, 4, 4).contiguous())
    )
    assert one.order == many.order
    assert many.costs == pytest.approx([cost / 2 for cost in one.costs], rel=0.02)


class Padded(nn.Module):
    """Reads tokens, and a mask of those that count."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x) * attention_mask.unsqueeze(-1)
        return outputs


@pytest.mark.parametrize("lengths", [(9, 5), (5, 9)])
def test_places_of_padding_do_not_count_and_neither_does_which_inputs_come_first(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Padded(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)))
    tokens = torch.randn(100, 4, 6)

    def curve(*sizes: int) -> Curve:
        calls = [
            {
                "x": nn.functional.pad(tokens[start : start + 50], (0, 0, 0, size - 4)),
                "attention_mask": (torch.arange(size) < 4).long().repeat(50, 1),
            }
            for start, size in zip((0, 50), sizes, strict=True)
        ]
        return ClosedForm(copy.deepcopy(model), calls[0], Calibration(calls, [50, 50])).curves["layers.0"]

    short, long = curve(4, 4), curve(*lengths)
    assert long.order == short.order
    assert long.costs == pytest.approx(short.costs)
