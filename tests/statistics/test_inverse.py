"""P as pruning uses it: Schur complements, refits and blocks against closed forms, in all forms of P."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsprune.statistics.inverse import Autocorrelation, DenseInverse, FactoredInverse, Inverse, complement, from_rows

DAMPING = 1e-2


def forms(rows: Tensor) -> tuple[Tensor, list[Inverse]]:
    """The autocorrelation, and all forms of its inverse."""
    delta = DAMPING * rows.square().mean().item()
    autocorrelation = rows.T @ rows / len(rows) + delta * torch.eye(rows.shape[1]).double()
    P = torch.linalg.inv(autocorrelation)
    return autocorrelation, [
        DenseInverse(P),
        Autocorrelation(autocorrelation),
        FactoredInverse(rows / (len(rows) * delta) ** 0.5, delta),
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    n, m, out = draw(st.integers(2, 12)), draw(st.integers(1, 15)), draw(st.integers(1, 4))
    gone = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n - 1, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows = torch.randn(m, n, generator=generator).double()
    return rows, torch.randn(n, out, generator=generator).double(), torch.tensor(sorted(gone))


@given(problems())
@settings(deadline=None)
def test_the_schur_complement_is_the_inverse_of_the_remaining_autocorrelation(problem: tuple[Tensor, ...]) -> None:
    rows, _, gone = problem
    A, inverses = forms(rows)
    stay = complement(len(A), gone)
    expected = torch.linalg.inv(A[stay][:, stay])
    everything = torch.arange(len(stay)).unsqueeze(0)
    for P in inverses:
        torch.testing.assert_close(P.without(gone).left().blocks(everything)[0], expected, rtol=1e-8, atol=1e-8)


@given(problems())
@settings(deadline=None)
def test_compensation_is_the_least_squares_refit(problem: tuple[Tensor, ...]) -> None:
    rows, weights, gone = problem
    A, inverses = forms(rows)
    stay = complement(len(A), gone)
    # Rows whose autocorrelation is A: the refit must minimise the error of the layer's output on them.
    root = torch.linalg.cholesky(A).mT
    expected = torch.linalg.lstsq(root[:, stay], root @ weights).solution
    for P in inverses:
        torch.testing.assert_close(P.without(gone).refit(weights), expected, rtol=1e-8, atol=1e-8)


@given(problems())
@settings(deadline=None)
def test_row_sums_and_blocks_are_those_of_p(problem: tuple[Tensor, ...]) -> None:
    rows, _, gone = problem
    A, inverses = forms(rows)
    P = torch.linalg.inv(A)
    units = torch.stack([gone, gone.flip(0)])
    for form in inverses:
        torch.testing.assert_close(form.row_sums(len(A) - 1), P[:-1, :-1].sum(1), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(form.blocks(units), torch.stack([P[u][:, u] for u in units]), rtol=1e-6, atol=1e-8)


def test_the_cheaper_form_is_taken_and_both_agree() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 6).double()
    assert isinstance(from_rows(rows, DAMPING), Autocorrelation)
    wide = from_rows(torch.cat([rows, rows], 1), DAMPING)
    assert isinstance(wide, FactoredInverse)
    _, (dense, _, _) = forms(torch.cat([rows, rows], 1))
    units = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(wide.blocks(units), dense.blocks(units))


def test_a_p_that_is_not_positive_definite_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="not positive definite"):
        DenseInverse(-torch.eye(3).double()).without(torch.tensor([0])).left()


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_rows_give_their_damped_autocorrelation_tile_by_tile(n: int) -> None:
    rows = torch.rand(max(n, 200), n, generator=torch.Generator().manual_seed(0))
    P = from_rows(rows, DAMPING)
    assert isinstance(P, Autocorrelation)
    expected, _ = forms(rows.double())
    torch.testing.assert_close(P.A.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(P.A, P.A.mT)


@pytest.mark.parametrize("n", [130, 300])
def test_the_schur_complement_of_a_large_p(n: int) -> None:
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(0)).double()
    A, (dense, *_) = forms(rows)
    gone = torch.arange(0, n, 7)
    stay = complement(n, gone)
    smaller = dense.without(gone).left().blocks(torch.arange(len(stay)).unsqueeze(0))[0]
    torch.testing.assert_close(smaller, torch.linalg.inv(A[stay][:, stay]), rtol=1e-8, atol=1e-8)
    assert torch.equal(smaller, smaller.mT)


@given(problems())
@settings(deadline=None)
def test_a_refit_after_scores_is_the_same(problem: tuple[Tensor, ...]) -> None:
    rows, weights, gone = problem
    autocorrelation, _ = forms(rows)
    fresh, scored = Autocorrelation(autocorrelation), Autocorrelation(autocorrelation)
    scored.blocks(torch.arange(len(autocorrelation)).unsqueeze(1))
    refits = [P.without(gone).refit(weights) for P in (fresh, scored)]
    torch.testing.assert_close(*refits, rtol=1e-8, atol=1e-8)


def test_rows_in_single_precision_with_one_input_that_outweighs_all_others() -> None:
    rows = 1e-3 * torch.rand(64, 2000, generator=torch.Generator().manual_seed(0))
    rows[:, 7] = torch.linspace(1, 2, 64)
    P, reference = from_rows(rows, 1e-3), from_rows(rows.double(), 1e-3)
    units = torch.arange(2000).view(-1, 1)
    assert (P.blocks(units) > 0).all()
    torch.testing.assert_close(P.blocks(units), reference.blocks(units), rtol=1e-3, atol=0)
    gone, weights = torch.arange(0, 2000, 3), torch.rand(2000, 2).double()
    removals = [form.without(gone) for form in (P, reference)]
    torch.testing.assert_close(removals[0].refit(weights), removals[1].refit(weights), rtol=1e-3, atol=1e-3)
