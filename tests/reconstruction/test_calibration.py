"""Which rows are drawn of which input, whoever has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlsprune.graph.sites import find_sites
from rlsprune.reconstruction.calibration import Calibration, Lanes, _uniform
from rlsprune.reconstruction.replay import Replay, closing


def drawn(model: nn.Module, inputs: Tensor, sizes: list[int], rows: int) -> tuple[set[tuple[int, int]], set[int]]:
    """Input and place of every row that is drawn, and the inputs that are held back."""
    calls = list(inputs.split(sizes))
    calibration = Calibration(calls, sizes)
    replay = Replay(model, find_sites(model, inputs), calls, ahead=False)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    with closing(replay):
        stops = replay.advance(len(calls))
        places = calibration.draw(stops, 3, Lanes(len(calls), len(calls), len(inputs)), rows)
        fitted, held = calibration.split(stops, places)
    each = stops[0].product.places // sizes[0]
    found = {(int(start + p // each), int(p % each)) for start, own in zip(starts, places, strict=False) for p in own}
    back = {int(start + p // each) for start, own in zip(starts, held, strict=False) for p in own}
    kept = {int(start + p // each) for start, own in zip(starts, fitted, strict=False) for p in own}
    assert back.isdisjoint(kept)
    assert sum(map(len, fitted)) + sum(map(len, held)) == len(found)
    return found, back


@pytest.mark.parametrize("rows", [200, 10**6])
def test_what_is_drawn_of_an_input_does_not_depend_on_how_inputs_are_divided(rows: int) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Conv2d(3, 2, 3)).eval(), torch.randn(60, 3, 8, 8)
    found = drawn(model, inputs, [60], rows)
    assert drawn(model, inputs, [20, 20, 20], rows) == found
    assert drawn(model, inputs, [1] * 60, rows) == found
    counts = torch.tensor([sum(image == number for image, _ in found[0]) for number in range(60)])
    # Draws with replacement: a few fall together.
    assert (int(counts.min()), int(counts.max())) == ((3, 4) if rows == 200 else (36, 36))
    assert 6 <= len(found[1]) <= 18, "about a fifth"


def test_of_few_inputs_some_rows_are_held_back() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Conv2d(3, 2, 3)).eval(), torch.randn(3, 3, 8, 8)
    calibration = Calibration([inputs], [3])
    replay = Replay(model, find_sites(model, inputs), [inputs], ahead=False)
    with closing(replay):
        stops = replay.advance(1)
        (fitted,), (held,) = calibration.split(stops, calibration.draw(stops, 0, Lanes(1, 1, 3)))
    assert 10 < len(held) < 35
    assert sorted([*fitted.tolist(), *held.tolist()]) == list(range(108))


def test_draws_are_spread_evenly_and_have_nothing_in_common() -> None:
    values = _uniform(5, torch.arange(2000), 8)
    counts = torch.histc(values.float(), 10, 0, 1)
    assert float((counts - 1600).abs().max()) < 5 * 1600**0.5
    others = _uniform(6, torch.arange(2000), 8)
    table = torch.stack([values[:, 0], values[:, 1], others[:, 0], values.roll(1, 0)[:, 0]])
    assert float((torch.corrcoef(table) - torch.eye(4)).abs().max()) < 0.1
