"""Learning rate and input noise of a run, and the tolerance of its gate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from rlsprune.experiments.config import RLS_DEFAULTS, make_config
from rlsprune.experiments.run import load_data, make_recipe, run
from rlsprune.train.folder import RunFolder
from rlsprune.train.observer import Observer
from rlsprune.train.pruning import RLSPruning
from rlsprune.train.run import Run
from rlsprune.train.settings import TrainingSettings


def current(tmp_path: Path, tiny: dict[str, Any], training: TrainingSettings, epochs: int) -> Run:
    config = make_config("digits-fnn", "none", training=training, epochs=epochs, **tiny)
    return Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))


def test_learning_rate_stays_and_then_falls_to_zero(tmp_path: Path, tiny: dict[str, Any]) -> None:
    live = current(tmp_path, tiny, TrainingSettings(lr_decay=0.5), epochs=4)
    rates: list[float] = []
    live.optimizer.register_step_pre_hook(lambda *_: rates.append(live.optimizer.param_groups[0]["lr"]))
    for _ in range(4):
        live.epoch(Observer())
    half = len(rates) // 2
    assert rates[:half] == [1.0] * half
    assert rates[half:] == pytest.approx([1 - step / half for step in range(half)])
    assert live.optimizer.param_groups[0]["lr"] == 0


def test_noise_zeroes_its_share_keeps_the_mean_and_spares_evaluation(tmp_path: Path, tiny: dict[str, Any]) -> None:
    live = current(tmp_path, tiny, TrainingSettings(input_noise=0.25), epochs=1)
    state = live.batches.state_dict()
    clean = torch.cat([inputs for inputs, _ in live.batches])
    live.batches.load_state_dict(state)
    noisy = torch.cat([inputs for inputs, _ in live._noisy(live.batches)])
    gone = (noisy == 0) & (clean != 0)
    assert (noisy[~gone] - clean[~gone] / 0.75).abs().max() < 1e-6
    assert gone.sum() / (clean != 0).sum() == pytest.approx(0.25, abs=0.02)
    assert live._evaluate(live.data.test) == live._evaluate(live.data.test)


def test_no_noise_leaves_the_random_state_alone(tmp_path: Path, tiny: dict[str, Any]) -> None:
    live = current(tmp_path, tiny, TrainingSettings(), epochs=1)
    before = torch.get_rng_state()
    list(live._noisy(live.batches))
    assert torch.equal(torch.get_rng_state(), before)


def pruning(tolerance: float, inputs: Tensor) -> RLSPruning:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = replace(RLS_DEFAULTS, criterion="l1", compensate=False, tolerance=tolerance, target=None)
    return RLSPruning(model, optimizer, inputs, settings, epochs=100, warmup_epochs=0)


@pytest.mark.parametrize(("tolerance", "epochs"), [(0.0, [1, 4, 5]), (0.05, [1, 2, 4, 5])])
def test_gate_opens_up_to_the_tolerance_above_the_last_prune(tolerance: float, epochs: list[int]) -> None:
    method = pruning(tolerance, torch.rand(1, 8))
    losses = [1.0, 1.04, 1.1, 0.99, 0.98]
    events = [method.end_epoch(epoch, loss) for epoch, loss in enumerate(losses, 1)]
    assert [epoch for epoch, event in enumerate(events, 1) if event is not None] == epochs
    assert [event.loss for event in events if event is not None] == [losses[epoch - 1] for epoch in epochs]


def test_pruning_ends_at_the_target(tmp_path: Path, tiny: dict[str, Any]) -> None:
    settings = replace(RLS_DEFAULTS, tolerance=10.0, target=0.5, settle=0.0)
    summary = run(make_config("digits-fnn", pruning=settings, epochs=5, warmup_epochs=0, **tiny), RunFolder(tmp_path))
    assert summary["weights_percent"] == pytest.approx(50, abs=2)
