"""Which multiple of channels costs no time: of networks whose time is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import rlsprune
from rlsprune.graph import find_groups
from rlsprune.model import latency
from rlsprune.prune.rounding import free_multiple


class Clock:
    """Goes on when a network says so, and not by itself: other work on the machine changes nothing."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "Timer", partial(Timer, timer=CLOCK))


class Timed(nn.Module):
    """Its forward takes as long as its hidden width says."""

    def __init__(self, milliseconds: Callable[[int], float], hidden: int = 40) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.read, self.write = nn.Linear(6, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.read(x).relu()
        CLOCK.now += self.milliseconds(hidden.shape[1]) / 1000
        return self.write(hidden)


def by_the_channel(width: int) -> float:
    return 0.1 * width


def in_blocks_of_eight(width: int) -> float:
    return 4.0 * -(-width // 8) + (1.0 if width % 8 else 0.0)


@pytest.mark.parametrize(
    ("milliseconds", "hidden", "multiple"),
    [(by_the_channel, 40, 1), (in_blocks_of_eight, 40, 16), (in_blocks_of_eight, 32, 8)],  # 27 → 32; 23 → 24, 32
)
def test_it_is_the_largest_that_is_no_slower(milliseconds: Callable[[int], float], hidden: int, multiple: int) -> None:
    model, example = Timed(milliseconds, hidden), torch.rand(1, 6)
    assert free_multiple(model, example, find_groups(model, example).groups) == multiple
    assert model.read.out_features == hidden, "copies are cut"


def test_a_target_of_latency_rounds_and_others_do_not() -> None:
    torch.manual_seed(0)
    inputs = torch.rand(256, 6)
    for target, multiple in ({"latency": 0.7}, 16), ({"params": 0.7}, 1):
        model = Timed(in_blocks_of_eight)
        rlsprune.shrink(model, inputs.split(64), target=target)
        assert model.read.out_features < 40
        assert model.read.out_features % multiple == 0
        model = Timed(in_blocks_of_eight)
        pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs[:1], target=target)
        pruner.calibrate(inputs.split(64))
        event = pruner.prune()
        assert event is not None
        assert model.read.out_features < 40
        assert model.read.out_features % multiple == 0


def test_a_layer_too_narrow_for_the_multiple_is_pruned_all_the_same() -> None:
    torch.manual_seed(0)
    model, inputs = Timed(in_blocks_of_eight), torch.rand(256, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, inputs[:1], target={"latency": 0.1})
    widths = []
    for _ in range(4):
        pruner.calibrate(inputs.split(64))
        assert pruner.prune() is not None
        widths.append(model.read.out_features)
    assert widths == [32, 28, 24, 20], "a multiple of sixteen, and of four where a fifth is less than eight"
