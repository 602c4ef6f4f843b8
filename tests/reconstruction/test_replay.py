"""Forwards that stop at every layer, and what is known of a layer there."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph.sites import find_sites
from rlsprune.model.lanes import Lane
from rlsprune.reconstruction.calibration import Calibration, Lanes
from rlsprune.reconstruction.replay import Replay, closing
from zoo import ZOO, Conv1D


def test_sites_know_norms_sums_and_clipping() -> None:
    model = ZOO["resnet-basic"].model().eval()
    sites = {site.layer: site for site in find_sites(model, ZOO["resnet-basic"].inputs()).values()}
    first, second = sites["blocks.1.conv1"], sites["blocks.1.conv2"]
    assert (first.norms, first.sums, first.low, first.high) == (("blocks.1.bn1",), False, 0.0, math.inf)
    # The projection is computed after the branch, so it is what makes up for the branch in the sum.
    projection = sites["blocks.1.project.0"]
    assert (second.sums, second.low, projection.sums, projection.low) == (False, -math.inf, True, 0.0)
    assert (sites["blocks.0.conv2"].sums, sites["fc"].sums, sites["fc"].low) == (True, False, -math.inf)
    mobile = {
        site.layer: site for site in find_sites(ZOO["mobilenet"].model().eval(), ZOO["mobilenet"].inputs()).values()
    }
    assert (mobile["blocks.0.expand.0"].low, mobile["blocks.0.expand.0"].high) == (0.0, 6.0)
    assert mobile["blocks.0.project.0"].high == math.inf


def test_an_output_that_is_read_twice_has_no_norm_or_clipping_of_its_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.relu(self.norm(y)) + y

    (site,) = find_sites(Twice().eval(), torch.randn(3, 4)).values()
    assert (site.norms, site.sums, site.low) == ((), False, -math.inf)


@pytest.mark.parametrize("how", ["called twice", "same shift"])
def test_a_batch_norm_that_two_layers_share_is_neither_layers_own(how: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
            self.norm = self.again = nn.BatchNorm1d(8)
            if how == "same shift":
                self.again = nn.BatchNorm1d(8)
                self.again.bias = self.norm.bias
            self.last, self.own = nn.Linear(16, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.last(torch.cat([self.norm(self.one(x)), self.again(self.other(x))], 1)))

    sites = find_sites(Shared().eval(), torch.randn(4, 6))
    assert {site.layer: site.norms for site in sites.values()} == {"one": (), "other": (), "last": ("own",)}


def test_changes_made_at_a_stop_count_from_there_on() -> None:
    model = ZOO["resnet-basic"].model().eval()
    inputs = [ZOO["resnet-basic"].inputs(seed, batch=4) for seed in (1, 2)]
    sites = find_sites(model, inputs[0])
    seen: list[str] = []
    results: list[Tensor] = []
    replay = Replay(model, sites, inputs, ahead=True)
    with closing(replay), torch.no_grad():
        while stops := replay.advance(1 if len(seen) < 3 else 2):  # the second batch joins later
            seen.append(stops[0].site.layer)
            model.get_submodule(seen[-1]).weight.mul_(0.5)
            results = [stop.product.inputs.clone() for stop in stops]
    assert sorted(seen) == sorted(site.layer for site in sites.values())
    wanted: list[Tensor] = []
    handle = model.fc.register_forward_pre_hook(lambda _, args: wanted.append(args[0]))
    with torch.no_grad():
        for batch in inputs:
            model(batch)
    handle.remove()
    torch.testing.assert_close(results, wanted)


@pytest.mark.parametrize("layer", [nn.Linear(6, 3), Conv1D(3, 6)], ids=["linear", "conv1d"])
def test_padding_tokens_are_never_drawn(layer: nn.Module) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(9, 6), layer

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(self.embed(ids)) * attention_mask.unsqueeze(-1)

    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"ids": torch.randint(9, (2, 5)), "attention_mask": mask}
    model = Tokens().eval()
    replay = Replay(model, find_sites(model, batch), [batch], ahead=False)
    with closing(replay):
        (where,) = Calibration([batch], [2]).draw(replay.advance(1), 0, Lanes(1, 1, 2))
    assert where.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


def test_networks_that_call_other_layers_for_other_inputs_are_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.sum() > 0 else self.two(x)

    model = Fickle().eval()
    sites = {**find_sites(model, torch.ones(2, 4)), **find_sites(model, -torch.ones(2, 4))}
    replay = Replay(model, sites, [torch.ones(2, 4), -torch.ones(2, 4)], ahead=True)
    with closing(replay), pytest.raises(ValueError, match="same layers in the same order"):
        replay.advance(2)


def test_a_lane_hands_on_errors_and_ends_when_it_is_closed() -> None:
    def broken(lane: Lane[int]) -> None:
        lane.hand_out(1)
        raise RuntimeError("in the middle")

    lane = Lane(broken)
    assert lane.advance() == 1
    with pytest.raises(RuntimeError, match="in the middle"):
        lane.advance()
    assert lane.advance() is None
    before = threading.active_count()
    waiting: Lane[int] = Lane(lambda lane: lane.hand_out(2))
    assert waiting.advance() == 2
    waiting.close()
    assert threading.active_count() == before


def test_lanes_compute_in_the_thread_that_advances_them() -> None:
    threads: list[threading.Thread] = []

    def work(lane: Lane[int]) -> None:
        lane.hand_out(lane.outside(lambda: 1))
        lane.outside(lambda: threads.append(threading.current_thread()))
        with pytest.raises(ZeroDivisionError):
            lane.outside(lambda: 1 // 0)
        lane.hand_out(2)

    lane = Lane(work)
    assert (lane.advance(), lane.advance(), lane.advance()) == (1, 2, None)
    assert threads == [threading.current_thread()]


def test_an_interrupt_while_a_lane_computes_leaves_no_thread_behind() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    lane: Lane[int] = Lane(lambda lane: lane.outside(interrupted))
    with pytest.raises(KeyboardInterrupt):
        lane.advance()
    lane.close()
    assert threading.active_count() == before
