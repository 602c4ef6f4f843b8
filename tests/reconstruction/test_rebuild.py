"""The sequential refit, against closed forms in float64."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph import find_groups, plan_cuts
from rlsprune.graph.sites import find_sites
from rlsprune.model.product import product_of
from rlsprune.prune.surgery import apply_cuts
from rlsprune.reconstruction.calibration import Calibration, Reduction
from rlsprune.reconstruction.leastsquares import LeastSquares, best_damping, clipped_fit
from rlsprune.reconstruction.norms import make_consistent
from rlsprune.reconstruction.rebuild import rebuild
from rlsprune.reconstruction.rows import FitRows, Part, count_rows, gather_all
from zoo import ZOO, evaluate, make_twin

REFITTED = (
    *(
        "vgg",
        "vgg-bn",
        "resnet-basic",
        "resnet-bottleneck",
        "resnet-padded",
        "resnext",
        "densenet",
        "inception",
        "mobilenet",
    ),
    *("squeeze-excite", "unet", "group-norm", "prelu", "conv1d", "conv3d", "vit", "gated", "fnn", "gpt2"),
)


@pytest.mark.parametrize("name", REFITTED)
def test_a_network_with_redundant_channels_is_reproduced_without_them(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.model().double().eval()
    example = specimen.inputs().double()
    graph = find_groups(model, example)
    # Queries and keys read each other: no layer could make up for what they lose.
    groups = [group for group in graph if not group.is_input and not group.products and group.size > 2]
    assert groups
    for group in groups:
        make_twin(group, 0, of=group.size - 1)
    whole = copy.deepcopy(model)
    sites = find_sites(whole, example)
    cuts = plan_cuts([(group, [0]) for group in groups])
    apply_cuts(model, cuts)
    kept = {name: stay.nonzero().flatten() for (name, side), stay in cuts.stay.items() if side != "in"}
    inputs = [specimen.inputs(seed, batch=256).double() for seed in range(10, 16)]
    fresh = specimen.inputs(99, batch=16).double()
    wanted = evaluate(whole, fresh)
    assert not torch.allclose(evaluate(model, fresh), wanted, rtol=1e-3, atol=1e-3)
    refitted = rebuild(whole, model, sites, kept, Calibration(inputs, [256] * 6), damping=1e-13)
    torch.testing.assert_close(evaluate(model, fresh), wanted, rtol=1e-5, atol=1e-6)
    assert refitted
    left = make_consistent(model, inputs)
    assert not left
    torch.testing.assert_close(evaluate(model, fresh), wanted, rtol=1e-5, atol=1e-6)


def test_nothing_is_refitted_where_nothing_has_drifted() -> None:
    specimen = ZOO["resnet-basic"]
    model = specimen.model().eval()
    whole = copy.deepcopy(model)
    inputs = specimen.inputs(3, batch=32)
    assert rebuild(whole, model, find_sites(whole, inputs), {}, Calibration([inputs], [32])) == []
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))


def test_an_error_before_a_residual_sum_is_made_up_for_behind_it() -> None:
    # The shortcut is wrong by a linear map of the branch's own input, so the branch can take all of it back.
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 5)
            self.branch = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.project(x) + self.branch(x)

    whole = Net().double()
    broken = copy.deepcopy(whole)
    fixed = broken.project.weight.detach().clone()
    inputs = torch.randn(64, 6, dtype=torch.float64)
    sites = find_sites(whole, inputs)
    assert [site.sums for site in sites.values()] == [False, True]
    branch_only = {key: site for key, site in sites.items() if site.layer == "branch"}
    broken.project.weight.data.add_(torch.randn(5, 6))
    fixed = broken.project.weight.detach().clone()
    rebuild(whole, broken, branch_only, {}, Calibration([inputs[:40], inputs[40:]], [40, 24]), damping=1e-13)
    torch.testing.assert_close(broken(inputs), whole(inputs))
    assert torch.equal(broken.project.weight, fixed)


@pytest.mark.parametrize(("rows", "width", "groups"), [(50, 8, 1), (50, 8, 3), (6, 20, 1), (6, 20, 2)])
def test_least_squares_is_the_damped_closed_form(rows: int, width: int, groups: int) -> None:
    torch.manual_seed(0)
    X, start = torch.randn(groups, rows, width).double(), torch.randn(groups, width, 4).double()
    Y = torch.randn(groups, rows, 4).double()
    delta = 0.1 * X.square().mean((1, 2))
    # ‖XW − Y‖²/m + δ‖W − W₀‖² as one system of equations.
    root = (delta * rows).sqrt()[:, None, None]
    system = torch.cat([X, root * torch.eye(width).double().expand(groups, -1, -1)], dim=1)
    wanted = torch.linalg.lstsq(system, torch.cat([Y, root * start], dim=1)).solution
    torch.testing.assert_close(LeastSquares(X, start, 0.1)(Y), wanted)


def test_a_clipped_fit_reaches_the_optimum_of_the_convex_problem() -> None:
    torch.manual_seed(0)
    X, start = torch.randn(1, 200, 5).double(), torch.zeros(1, 5, 3).double()
    Y = torch.randn(1, 200, 3).double()
    low, high = torch.full((1, 1, 3), -0.3).double(), torch.full((1, 1, 3), 0.8).double()
    problem = LeastSquares(X, start, 1e-13)

    def error(W: Tensor) -> Tensor:
        outputs = X @ W
        free = ((low >= Y) & (outputs <= low)) | ((high <= Y) & (outputs >= high))
        nearest = torch.where(low >= Y, low, torch.where(high <= Y, high, Y))
        return ((outputs - nearest) * ~free).square().sum()

    errors = [float(error(clipped_fit(problem, Y, low, high, rounds))) for rounds in (0, 1, 2, 5, 300)]
    # At first the targets themselves count, beyond the ends of the interval.
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(errors))
    W = clipped_fit(problem, Y, low, high, 300).requires_grad_()
    (slope,) = torch.autograd.grad(error(W), W)
    assert errors[-1] < errors[0]
    assert float(slope.abs().max()) < 0.15 * errors[-1]


@pytest.mark.parametrize("name", ["vgg-bn", "resnet-basic", "densenet", "conv1d"])
def test_training_mode_computes_what_evaluation_mode_does(name: str) -> None:
    model = ZOO[name].model().double()
    inputs = ZOO[name].inputs(7, batch=32).double()
    before = evaluate(model, inputs)
    running = [
        (m.running_mean.clone(), m.momentum) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    assert running
    assert make_consistent(model, [inputs[:20], inputs[20:]]) == []
    torch.testing.assert_close(evaluate(model, inputs), before)
    model.train()
    torch.testing.assert_close(model(inputs), before)


def test_batch_norms_that_cannot_be_changed_are_named() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)
    )
    assert make_consistent(model, [torch.randn(8, 3)]) == ["1"]
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].bias = model[0].bias
    assert make_consistent(model, [torch.randn(8, 3)]) == ["0", "1"]


def test_a_batch_norm_that_is_called_twice_is_left_alone() -> None:
    """In training mode each call has statistics of its own, and no one scale makes up for both."""
    shared, own = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model = nn.Sequential(own, shared, nn.Linear(3, 3), shared)
    before = copy.deepcopy(model.state_dict())
    assert make_consistent(model, [torch.randn(8, 3), torch.randn(4, 3)]) == ["1"]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.running_mean", "0.running_var", "0.weight", "0.bias"}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv2d(6, 4, 3, padding=1, stride=2),
        nn.Conv2d(6, 4, (3, 2), padding="same", dilation=2),
        nn.Conv2d(6, 4, 3, padding=2, padding_mode="reflect"),
        nn.Conv2d(6, 6, 3, groups=3, bias=False),
        nn.Conv1d(6, 4, 3, padding="valid"),
        nn.Conv3d(6, 4, 2, padding=(0, 1, 1)),
        nn.ConvTranspose2d(6, 4, 2, 2),
        nn.ConvTranspose2d(6, 4, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 2), dilation=(2, 3)),
        nn.ConvTranspose1d(6, 9, 3, stride=2, groups=3),
        nn.ConvTranspose3d(6, 2, 2, padding=1),
    ],
)
def test_a_call_is_its_rows_times_the_weight_matrix(layer: nn.Module) -> None:
    shapes = {"r": (5, 7, 6), "1d": (5, 6, 9), "2d": (5, 6, 8, 9), "3d": (2, 6, 4, 5, 5)}
    calls = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:  # type: ignore[type-arg]
            product = product_of(func, args, kwargs or {})  # type: ignore[arg-type]
            if product is not None:
                calls.append(product)
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with torch.no_grad(), Watch():
        output = layer(torch.randn(shapes[type(layer).__name__.removeprefix("Linea")[-2:]]))
    (product,) = calls
    where = torch.arange(product.places)[::3]
    assert torch.equal(product.weight_of(product.matrix), product.weight)
    outputs = (product.rows(where) @ product.matrix).movedim(0, 1).flatten(1)
    if product.bias is not None:
        outputs = outputs + product.bias.detach()
    torch.testing.assert_close(outputs, product.at(output, where), rtol=1e-4, atol=1e-5)


def test_more_damping_where_it_is_better_on_rows_that_were_held_back() -> None:
    tried = {1e-3: 3.0, 1e-2: 2.0, 1e-1: 1.0, 1.0: 4.0}
    assert best_damping(tried.__getitem__, 1e-3) == 1e-1
    assert best_damping({**tried, 1e-2: 3.0}.__getitem__, 1e-3) == 1e-3, "no further than it helps"
    assert best_damping(lambda damping: math.nan, 1e-3) == 1e-3
    torch.manual_seed(0)
    X, start, Y = torch.randn(1, 50, 8).double(), torch.randn(1, 8, 3).double(), torch.randn(1, 50, 3).double()
    torch.testing.assert_close(LeastSquares(X, start, 1e-3).damped(0.1)(Y), LeastSquares(X, start, 0.1)(Y))


@pytest.mark.parametrize(("groups", "outputs"), [(1, 7), (1, 1), (2, 5), (3, 1), (8, 4)])
def test_ranks_solve_for_parts_of_one_solution(groups: int, outputs: int) -> None:
    torch.manual_seed(0)
    X, Y = torch.randn(groups, 30, 4).double(), torch.randn(groups, 30, outputs).double()
    low, high = Y - torch.rand_like(Y), torch.full((groups, 1, outputs), 0.5).double()
    rows = FitRows(X, Y, low, high, [20, 10])
    start = torch.randn(groups, 4, outputs).double()
    problem = LeastSquares(X, start, 0.1, pieces=rows.pieces)
    whole = clipped_fit(problem, Y, low, high, 3)
    for size in (1, 2, 3):
        joined, errors = torch.full_like(whole, math.nan), 0.0
        for part in (Part.share(groups, outputs, rank, size) for rank in range(size)):
            own = rows.part(part)
            assert own.low is not None
            assert own.high is not None
            assert part.of(joined).isnan().all(), "an output belongs to one rank"
            part.of(joined).copy_(clipped_fit(problem.part(part), own.targets, own.low, own.high, 3))
            errors += float(own.errors(part.of(joined)))
        torch.testing.assert_close(joined, whole)
        assert errors == pytest.approx(float(rows.errors(whole)))
    assert Part.sampled(groups, outputs, 3).of(start).shape[2] == min(outputs, {1: 3, 2: 1, 3: 1, 8: 1}[groups])


class Together(Reduction):
    """One of two threads in place of ranks."""

    def __init__(self, rank: int, meeting: threading.Barrier, slots: list[Tensor]) -> None:
        super().__init__()
        self.rank, self.size, self._meeting, self._slots = rank, 2, meeting, slots

    def stacked(self, tensor: Tensor) -> Tensor:
        self._slots[self.rank] = tensor
        self._meeting.wait(60)
        result = torch.stack(self._slots)
        self._meeting.wait(60)
        return result


@pytest.mark.parametrize("ends_by_row", [False, True])
def test_gathered_rows_are_those_of_one_process_in_its_order(ends_by_row: bool) -> None:
    torch.manual_seed(0)
    owners = [0, 1, 0, 0]  # of each piece
    # Rows to fit to, and those held back, of each piece: inputs, targets and lower ends.
    kinds = [
        [[torch.randn(2, m, width) for width in (3, 4, 4)] for m in counts] for counts in ([4, 5, 1, 2], [1, 0, 2, 0])
    ]

    def rows(pieces: list[list[Tensor]]) -> FitRows:
        X, Y, low = (torch.cat(column, dim=1) for column in zip(*pieces, strict=True))
        low = low if ends_by_row else torch.zeros(2, 1, 4)
        return FitRows(X, Y, low, low + 1, [piece[0].shape[1] for piece in pieces], ends_by_row)

    wanted, meeting, slots = [rows(kind) for kind in kinds], threading.Barrier(2), [torch.zeros(0)] * 2

    def gathered(rank: int) -> list[FitRows]:
        batches = Calibration([torch.zeros(8, 1)] * 4, [8] * 4)
        batches.pieces = [[(8 * n, 8) for n in range(4) if owners[n] == of] for of in range(2)]
        batches.reduction = Together(rank, meeting, slots)
        own = [rows([kind[n] for n in range(4) if owners[n] == rank]) for kind in kinds]
        counts, numbers = count_rows(batches, own, torch.tensor([1.0 + rank]).double())
        assert numbers.tolist() == [3.0]
        assert counts.tolist() == [[[4, 1, 2], [1, 2, 0]], [[5, 0, 0], [0, 0, 0]]]
        return gather_all(batches, own, counts)

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(gathered, range(2)):
            for got, want in zip(found, wanted, strict=True):
                assert got.pieces == want.pieces
                assert all(torch.equal(one, other) for one, other in zip(got[:4], want[:4], strict=True))


def test_few_inputs_do_not_spoil_a_layer() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 30)).double()
    cut = copy.deepcopy(whole)
    cut[0].weight.data += 0.3 * torch.randn(40, 8)
    inputs, others = torch.randn(50, 8).double(), torch.randn(1000, 8).double()

    def error() -> float:
        return float((cut(others) - whole(others)).square().mean())

    rebuild(whole, cut, {k: s for k, s in find_sites(whole, inputs).items() if s.layer == "2"}, {},
            Calibration([inputs], [50]))  # fmt: skip
    chosen = error()
    cut[2].load_state_dict(whole[2].state_dict())
    with torch.no_grad():
        rows = torch.cat([cut[:2](inputs), torch.ones(50, 1)], 1)[None]
        start = torch.cat([whole[2].weight.mT, whole[2].bias[None]])[None]
        fixed = LeastSquares(rows[:, :40], start, 1e-3)(whole(inputs)[None, :40])[0]
        cut[2].weight.copy_(fixed[:-1].mT)
        cut[2].bias.copy_(fixed[-1])
    assert chosen < 0.7 * error()
