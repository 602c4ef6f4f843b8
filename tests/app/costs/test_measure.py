"""`rlsprune bench`: what is measured is what it says, and the network is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from rlsprune.app.cli.main import main
from rlsprune.app.costs.measure import measure_costs


def test_every_cost_is_a_ratio_to_momentum_sgd_and_the_network_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sgd, adamw, rls, sampling, event = measure_costs(model, torch.rand(8, 6), rounds=3)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert sgd.ratio == 1.0
    assert sgd.state_bytes == weights
    assert adamw.state_bytes == 2 * weights + 4 * 4, "two moments, and a step count for each of four parameters"
    assert rls.state_bytes == sampling.state_bytes == weights + 4 * (7 * 7 + 33 * 33), "velocities and P"
    assert event.state_bytes is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is three times slower in one round changes no ratio."""
    slow = iter([9.0] * 4 + [1.0, 2, 3, 4] + [3.0, 6, 9, 12])  # the first round does not count
    event = iter([9.0, 10, 60])
    monkeypatch.setattr("rlsprune.app.costs.measure._step", lambda *_: next(slow))
    monkeypatch.setattr("rlsprune.app.costs.measure._event", lambda *_: next(event))
    costs = measure_costs(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.rand(4, 2), rounds=2)
    assert [cost.ratio for cost in costs] == [1, 2, 3, 4, 15]
    assert [cost.quartiles for cost in costs][3:] == [(4, 4), (12.5, 17.5)]
    assert [cost.milliseconds for cost in costs][:2] == [2000, 4000]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    path = tmp_path / "nets.py"
    path.write_text(
        "from torch import nn\ndef f(): return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))\n"
    )
    own = ["bench", f"{path}:f", "--batch", "4", "--rounds", "1", "--threads", "1"]
    try:
        assert main([*own, "--shape", "1,8,8", "--json"]) == 0
        costs = json.loads(capsys.readouterr().out)
        assert [cost["name"] for cost in costs][::4] == ["step of momentum SGD", "prune of 20 %, obs, exact P"]
        assert main([*own, "--shape", "1,8,8"]) == 0
        assert "step of RLS, sampling inputs" in capsys.readouterr().out
        assert main(own) == 2
        assert "--shape 3,224,224" in capsys.readouterr().err
        assert main(["bench", "imagenet"]) == 2
        assert "there is no experiment 'imagenet'" in capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
