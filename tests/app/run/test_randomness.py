"""Every rank's random numbers, in one checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from rlsprune.app.run.randomness import RandomStates
from rlsprune.app.run.share import Share


class Rank(Share):
    """One of several processes, of which the states of the others are known."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.ranks: Any = type("Ranks", (), {"rank": rank, "size": size})()


def states(rank: int, size: int, seed: int = 0) -> RandomStates:
    return RandomStates(Rank(rank, size), torch.device("cpu"), seed)


def drawn() -> list[float]:
    return torch.rand(3).tolist()


def test_ranks_draw_numbers_of_their_own() -> None:
    numbers = []
    for rank in range(3):
        torch.manual_seed(0)
        states(rank, 3).draw_apart(0)
        numbers.append(drawn())
    torch.manual_seed(0)
    assert numbers[0] == drawn()
    assert len({tuple(own) for own in numbers}) == 3


def test_a_rank_goes_on_with_its_own_numbers_and_a_new_one_with_others() -> None:
    saved, expected = [], []
    for rank in range(2):
        torch.manual_seed(10 + rank)
        saved.append(torch.get_rng_state())
        expected.append(drawn())
    for rank in range(2):
        states(rank, 2).load_state_dict({"random": saved, "device_random": None}, 5)
        assert drawn() == expected[rank]
    states(2, 3).load_state_dict({"random": saved, "device_random": None}, 5)
    assert drawn() not in expected


def test_a_checkpoint_of_0_1_0_has_the_state_of_rank_0_alone() -> None:
    torch.manual_seed(3)
    state, expected = torch.get_rng_state(), drawn()
    states(0, 2).load_state_dict({"random": state}, 5)
    assert drawn() == expected
