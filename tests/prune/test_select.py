"""The choice of Eq. (30) at its edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsprune.prune.select import choose_units, cut_size


def choose(scores: list[list[float]], ratio: float = 0.5, keep: int = 1, round_to: int = 1) -> list[int]:
    return choose_units("layer", [torch.tensor(s) for s in scores], len(scores[0]), ratio, keep, round_to)


@given(st.integers(1, 200), st.integers(1, 99))
def test_cut_size_is_the_floor_of_the_exact_product(count: int, percent: int) -> None:
    assert cut_size(percent / 100, count) == count * percent // 100


def test_ties_go_to_the_lower_index() -> None:
    assert choose([[1.0] * 6]) == [0, 1, 2]
    assert choose([[1.0] * 6, [3.0, 2.0, 1.0, 1.0, 1.0, 1.0]]) == [2]


def test_a_unit_goes_only_if_every_vector_says_so() -> None:
    assert choose([[0.0, 1.0, 2.0, 3.0], [3.0, 0.0, 1.0, 2.0]]) == [1]
    assert choose([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]]) == []


def test_a_channel_goes_if_any_of_its_nodes_does() -> None:
    nodes = [[0.0, 9.0], [5.0, 5.0], [7.0, 1.0], [8.0, 8.0]]
    assert choose([nodes], ratio=0.25) == [0, 2]
    assert choose([nodes, [1.0, 2.0, 3.0, 4.0]], ratio=0.25) == [0]


def test_what_must_stay_stays_and_the_least_important_go() -> None:
    scores = [[5.0, 0.0, 4.0, 1.0, 3.0, 2.0]]
    assert choose(scores, ratio=0.9, keep=4) == [1, 3]
    assert choose(scores, ratio=0.9, keep=6) == []
    assert choose(scores, ratio=0.9, keep=10) == []


@given(st.integers(1, 40), st.integers(1, 99), st.integers(1, 9), st.integers(1, 5))
def test_what_stays_is_a_multiple_or_all(size: int, percent: int, round_to: int, keep: int) -> None:
    chosen = choose([[float(i) for i in range(size)]], percent / 100, keep, round_to)
    left = size - len(chosen)
    assert left == size or (left % round_to == 0 and left >= keep)
    assert len(chosen) <= size * percent // 100
    assert chosen == list(range(len(chosen)))


def test_scores_that_make_no_sense_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="not finite for 'layer'"):
        choose([[1.0, float("nan")]])
    with pytest.raises(ValueError, match=r"shape \(3,\) for 'layer', which has 2 units"):
        choose_units("layer", [torch.ones(3)], 2, 0.5, 1, 1)
