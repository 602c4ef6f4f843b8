"""A run that ends by its processor time: the schedule follows the share of it that is used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.settings import TrainingSettings
from rlsprune.app.experiments.recipe import load_data, make_recipe, run
from rlsprune.app.run.clock import CpuClock
from rlsprune.app.run.execute import Run
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.app.run.summary import summarise

SECONDS = 1.5


def burn(clock: CpuClock, seconds: float) -> None:
    """Computes until the processor was busy for that long."""
    probe = CpuClock()
    probe.start()
    while probe.used < seconds:
        sum(range(1000))


def test_clock_counts_what_is_computed_and_not_while_it_is_paused() -> None:
    clock = CpuClock(2.0)
    assert clock.used == 2.0
    clock.start()
    burn(clock, 0.05)
    with clock.paused():
        before = clock.used
        burn(clock, 0.1)
        assert clock.used == before
    clock.stop()
    assert 2.05 <= clock.used < 2.1
    assert clock.used == clock.used


def test_rate_falls_to_zero_with_the_time_and_the_last_epoch_is_cut_short(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config = make_config("digits-fnn", "none", optimizer="sgd", cpu_seconds=SECONDS, **tiny)
    config = replace(config, training=TrainingSettings(lr_decay=0.5))
    live = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))
    seen: list[tuple[float, float]] = []
    live.optimizer.register_step_pre_hook(lambda *_: seen.append((live.spent, live.optimizer.param_groups[0]["lr"])))
    while not live.over:
        live.epoch(Observer())
    assert SECONDS <= live.clock.used < 2 * SECONDS, "an epoch of this network takes a fraction of a second"
    early = [rate for share, rate in seen if share < 0.5]
    assert early
    assert set(early) == {config.rate}
    for share, rate in seen:
        assert rate >= config.rate * max(0.0, 1 - share) / 0.5 - 1e-9 or rate == config.rate
    assert live.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=0.05 * config.rate)
    assert len(live.record.metrics) == live.done == summarise(live)["epochs"]
    total = sum(line["cpu_seconds"] for line in live.record.metrics)
    assert total == pytest.approx(live.clock.used)


def test_resumed_run_has_only_the_time_that_is_left(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config = make_config("digits-fnn", "none", optimizer="sgd", cpu_seconds=SECONDS, **tiny)
    first = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))
    first.epoch(Observer())
    used = first.clock.used
    assert used > 0
    again = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))
    assert again.clock.used == used
    summary = run(config, RunFolder(tmp_path))
    assert SECONDS <= summary["cpu_seconds"] < 2 * SECONDS


def test_pruning_ends_with_the_share_of_the_time_that_is_left_for_settling(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    config = make_config("digits-fnn", cpu_seconds=9.0, warmup_epochs=0, tolerance=9.0, target=0.01, **tiny)
    live = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))
    method = live.method
    assert isinstance(method, RLSPruning)
    live.epoch(Observer())
    method.spent(0.59)
    assert not method.pruner.done
    live.epoch(Observer())
    method.spent(0.61)
    method.end_epoch(3, 1.0)
    assert method.pruner.done
