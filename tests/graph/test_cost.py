"""How many runs of the network it takes to find and prove what can go, and what a run of a part of it cannot show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph import find_groups
from rlsprune.graph.trial import CutTrial
from rlsprune.graph.verify import _selections
from zoo import FusedAttention


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(12), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Network(nn.Module):
    """Blocks around a residual stream, and what the network does with each block's output."""

    def __init__(self, count: int, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(5, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Block(inner()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.after(block, block(x))
        return self.out(x)

    def after(self, block: Block, x: Tensor) -> Tensor:
        return x


class KnowsTheWidth(Network):
    def after(self, block: Block, x: Tensor) -> Tensor:
        return x * block.inner.qkv.out_features


class Prepares(Network):
    """Sets what its blocks need before they run, and takes it away after."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.inner.factor = x.new_ones(())
        result = super().forward(x)
        for block in self.blocks:
            del block.inner.factor
        return result


class Scaled(FusedAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Splits(nn.Module):
    """Has the sizes of its halves in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.width = nn.Linear(12, 2 * width), nn.Linear(width, 12), width

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).split([self.width, self.width], -1)
        return self.down(value * gate.sigmoid())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module | None]:
    """What ran in every run of a trial; None: the whole network."""
    found: list[nn.Module | None] = []
    run = CutTrial.run

    def counted(self: CutTrial, state: dict[str, Tensor], part: nn.Module | None = None) -> object:
        found.append(part)
        return run(self, state, part)

    monkeypatch.setattr(CutTrial, "run", counted)
    return found


def attention() -> FusedAttention:
    return FusedAttention(12, 3)


def test_the_runs_of_a_transformer_grow_with_the_logarithm_of_its_groups(runs: list[nn.Module | None]) -> None:
    for count in (2, 7):
        runs.clear()
        model = Network(count, attention)
        graph = find_groups(model, torch.randn(2, 4, 5), ignore=["input"])
        groups = [group for group in graph if "[" in group.name]
        assert len(groups) == 2 * count
        # One without a change; a pair with all groups, and one for each selection of them.
        assert runs.count(None) == 1 + 2 * (1 + len(_selections(groups)))
        assert {run for run in runs if run is not None} == {model.blocks[0].inner}


def test_each_of_two_groups_is_once_tried_without_the_other() -> None:
    for count in range(40):
        numbers: list[Any] = list(range(count))
        selections = _selections(numbers)
        for one, other in itertools.permutations(numbers, 2):
            assert any(one in selection and other not in selection for selection in selections)
        assert len(selections) <= 4 or math.comb(len(selections) - 1, (len(selections) - 1) // 2) < count


def test_a_choice_that_is_wrong_after_the_block_is_found_out() -> None:
    graph = find_groups(KnowsTheWidth(2, attention), torch.randn(2, 4, 5), ignore=["input"])
    assert not [group for group in graph if "[" in group.name]
    assert all("is not what it is with them zeroed" in graph.skipped[f"blocks.{i}.inner[heads]"] for i in range(2))


def test_a_block_that_does_not_run_by_itself_is_tried_in_the_network(runs: list[nn.Module | None]) -> None:
    x = torch.randn(2, 4, 5)
    graph = find_groups(Prepares(2, lambda: Scaled(12, 3)), x, ignore=["input"])
    assert None in runs[1:7]
    plain = find_groups(Network(2, attention), x, ignore=["input"])
    assert [group.name for group in graph] == [group.name for group in plain]


def test_the_same_layer_of_every_block_is_told_apart_by_its_own_block(runs: list[nn.Module | None]) -> None:
    widths = iter(range(10, 90, 10))
    graph = find_groups(Network(8, lambda: Splits(next(widths))), torch.randn(2, 4, 5), ignore=["input"])
    assert not list(graph)
    reasons = [graph.skipped[f"blocks.{i}.inner.up"] for i in range(8)]
    assert all(f"split_sizes=[{10 * i + 10}, {10 * i + 10}]" in reason for i, reason in enumerate(reasons))
    assert runs.count(None) <= 1 + 2
