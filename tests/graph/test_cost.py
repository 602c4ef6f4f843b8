"""How many runs of the network it takes to find and prove what can go, and what a run of a part of it cannot show."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph import Group, find_groups
from rlsprune.graph.members import Member
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


def test_a_deep_transformer_takes_hardly_more_runs_than_a_shallow_one(runs: list[nn.Module | None]) -> None:
    for count, selections in ((2, 2), (7, 5), (10, 5)):
        runs.clear()
        model = Network(count, attention)
        graph = find_groups(model, torch.randn(2, 4, 5), ignore=["input"])
        groups = [group for group in graph if "[" in group.name]
        assert len(groups) == 2 * count
        # One without a change; a pair with all groups, and with each of as many selections as tell the heads of all
        # blocks apart; and one that confirms the first error of the first block.
        assert runs.count(None) == 1 + 2 * (1 + selections) + 1
        assert {run for run in runs if run is not None} == {model.blocks[0].inner}


def reading(name: str, *layers: nn.Module) -> Group:
    members = tuple(Member("", layer, "in", torch.arange(2).unsqueeze(1)) for layer in layers)
    return Group(name, 2, False, (), (), members)


def test_each_of_two_groups_that_meet_is_once_tried_without_the_other() -> None:
    layer = nn.Linear(2, 2)
    for count in range(40):
        groups = [reading(str(number), layer) for number in range(count)]
        selections = _selections(groups)
        for one, other in itertools.permutations(groups, 2):
            assert any(one in selection and other not in selection for selection in selections)
        assert len(selections) <= 4 or math.comb(len(selections) - 1, (len(selections) - 1) // 2) < count


def test_groups_that_do_not_meet_are_tried_together() -> None:
    layers = [nn.Linear(2, 2) for _ in range(30)]
    groups = [reading(str(number), *layers[number : number + 2]) for number in range(29)]
    assert [len(selection) for selection in _selections(groups)] == [15, 14]


class Borrows(nn.Module):
    """Attention with the number of heads of another one."""

    def __init__(self, lender: FusedAttention) -> None:
        super().__init__()
        self.own = FusedAttention(12, lender.num_heads)
        self.__dict__["lender"] = lender

    def forward(self, x: Tensor) -> Tensor:
        self.own.num_heads = self.lender.num_heads
        return self.own(x)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_two_blocks_with_one_number_of_heads_are_found_out(heads: int, at: int) -> None:
    blocks: list[nn.Module] = [FusedAttention(12, heads) for _ in range(5)]
    lender = blocks[at]
    assert isinstance(lender, FusedAttention)
    blocks[at + 1] = Borrows(lender)
    made = iter(blocks)
    graph = find_groups(Network(5, lambda: next(made)), torch.randn(2, 4, 5), ignore=["input"])
    found = {group.name for group in graph if group.name.endswith("[heads]")}
    assert len(found) == 3, "those of the other blocks"
    assert not {f"blocks.{at}.inner[heads]", f"blocks.{at + 1}.inner.own[heads]"} & found


def test_a_choice_that_is_wrong_after_the_block_is_found_out() -> None:
    graph = find_groups(KnowsTheWidth(2, attention), torch.randn(2, 4, 5), ignore=["input"])
    assert not [group for group in graph if "[" in group.name]
    assert all("differs from what it is with them" in graph.skipped[f"blocks.{i}.inner[heads]"] for i in range(2))


def test_a_block_that_does_not_run_by_itself_is_tried_in_the_network(runs: list[nn.Module | None]) -> None:
    x = torch.randn(2, 4, 5)
    graph = find_groups(Prepares(2, lambda: Scaled(12, 3)), x, ignore=["input"])
    assert runs[1] is not None
    assert runs[2] is None
    plain = find_groups(Network(2, attention), x, ignore=["input"])
    assert [group.name for group in graph] == [group.name for group in plain]


def test_the_same_layer_of_every_block_is_told_apart_by_its_own_block(runs: list[nn.Module | None]) -> None:
    widths = iter(range(10, 90, 10))
    graph = find_groups(Network(8, lambda: Splits(next(widths))), torch.randn(2, 4, 5), ignore=["input"])
    assert not list(graph)
    reasons = [graph.skipped[f"blocks.{i}.inner.up"] for i in range(8)]
    assert all(f"split_sizes=[{10 * i + 10}, {10 * i + 10}]" in reason for i, reason in enumerate(reasons))
    # One without a change, one of all groups, and one that confirms what the first block says.
    assert runs.count(None) == 3


class Remembers(FusedAttention):
    """Puts what it was last called with in front, unless the network has taken it away."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.last = made if self.last is None else torch.cat([self.last, self.qkv(x)], 1)
        return made


class Forgets(Network):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.inner.last = None
        return super().forward(x)


def test_an_error_that_only_the_block_by_itself_raises_does_not_count() -> None:
    graph = find_groups(Forgets(2, lambda: Remembers(12, 3)), torch.randn(2, 4, 5), ignore=["input"])
    plain = find_groups(Network(2, attention), torch.randn(2, 4, 5), ignore=["input"])
    assert [group.name for group in graph] == [group.name for group in plain]


class KnowsItsWidth(nn.Conv1d):
    """Made for as many channels as it had."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 8, 6)


def test_layers_of_one_container_are_not_each_tried_in_a_run_of_it(runs: list[nn.Module | None]) -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=1) for _ in range(20))), nn.Conv1d(8, 2, 6))
    model[0][3] = KnowsItsWidth(8, 8, 3, padding=1)
    graph = find_groups(model, torch.randn(2, 8, 6))
    assert "0.3" in graph.skipped
    assert len(graph.groups) == 19
    assert len(runs) < 20


def test_nothing_is_left_behind_by_a_part_that_cannot_be_called_again() -> None:
    class Locked(FusedAttention):
        def forward(self, x: Tensor, lock: object = None) -> Tensor:
            return super().forward(x)

    class Locks(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.norm(x), lock=threading.Lock())  # which cannot be copied

    model = Network(2, attention)
    model.blocks = nn.ModuleList(Locks(Locked(12, 3)) for _ in range(2))
    graph = find_groups(model, torch.randn(2, 4, 5), ignore=["input"])
    assert "blocks.1.inner[heads]" in [group.name for group in graph]
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert gc.isenabled()
