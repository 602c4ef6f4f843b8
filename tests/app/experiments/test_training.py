"""Learning rate and averaging of a run, and the tolerance of its gate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.settings import OURS, TrainingSettings
from rlsprune.app.experiments.recipe import load_data, make_recipe, run
from rlsprune.app.models import FNN
from rlsprune.app.run.execute import Run
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.io.modelfile import load
from rlsprune.training.loop import evaluate


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


def test_forward_passes_of_training_in_bfloat16_and_all_else_in_float32(tmp_path: Path, tiny: dict[str, Any]) -> None:
    found = {}
    for half in (False, True):
        config = make_config("digits-fnn", bfloat16=half, **{**tiny, "epochs": 3})
        live = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path / str(half)))
        seen: dict[bool, torch.dtype] = {}
        live.model.fc2.register_forward_hook(lambda layer, _, y, seen=seen: seen.update({layer.training: y.dtype}))  # type: ignore[union-attr]
        live.epoch(Observer())
        assert seen == {True: torch.bfloat16 if half else torch.float32, False: torch.float32}
        state = [*live.model.parameters(), *live.optimizer.inverse("fc1")]  # type: ignore[operator]
        assert {tensor.dtype for tensor in state} == {torch.float32}
        found[half] = live.record.metrics[0]["train_loss"]
    assert found[True] != found[False]
    assert found[True] == pytest.approx(found[False], rel=0.02)


def test_what_is_evaluated_is_the_moving_average(tmp_path: Path, tiny: dict[str, Any]) -> None:
    live = current(tmp_path, tiny, TrainingSettings(average=0.5), epochs=2)
    horizon = 0.5 * len(live.batches)
    expected: list[Tensor] = []

    def follow(*_: object) -> None:
        weights = live.model.fc2.weight.detach().clone()  # type: ignore[union-attr]
        mean = weights if not expected else expected[-1]
        expected.append(mean + (weights - mean) * max(1 / horizon, 3 / (3 + len(expected))))

    live.optimizer.register_step_post_hook(follow)
    live.epoch(Observer())
    assert torch.allclose(live.result.fc2.weight, expected[-1], atol=1e-6)  # type: ignore[union-attr,arg-type]
    assert not torch.allclose(live.model.fc2.weight, expected[-1], atol=1e-6)  # type: ignore[union-attr,arg-type]
    expected_score = evaluate(live.result, live.recipe.evaluation_batches(live.data.test), live.recipe.loss)
    scored = live._evaluate(live.data.test)
    assert (scored.loss, scored.scores) == (expected_score.loss, {"accuracy": expected_score.accuracy})


def test_the_average_is_pruned_with_the_network_and_kept(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config = make_config("digits-fnn", training=TrainingSettings(average=0.5), epochs=3, warmup_epochs=0, **tiny)
    summary = run(config, RunFolder(tmp_path))
    assert summary["events"] > 0
    live = Run(make_recipe(config, load_data(config)), RunFolder(tmp_path))  # from its last checkpoint
    assert [p.shape for p in live.result.parameters()] == [p.shape for p in live.model.parameters()]
    kept = load(RunFolder(tmp_path).model, into=FNN())
    assert all(map(torch.equal, kept.parameters(), live.result.parameters()))
    assert not all(map(torch.equal, kept.parameters(), live.model.parameters()))


def pruning(tolerance: float, inputs: Tensor) -> RLSPruning:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = replace(OURS, criterion="l1", compensate=False, tolerance=tolerance, target=None)
    return RLSPruning(model, optimizer, inputs, settings, epochs=100, warmup_epochs=0)


@pytest.mark.parametrize(("tolerance", "epochs"), [(0.0, [1, 4, 5]), (0.05, [1, 2, 4, 5])])
def test_gate_opens_up_to_the_tolerance_above_the_last_prune(tolerance: float, epochs: list[int]) -> None:
    method = pruning(tolerance, torch.rand(1, 8))
    losses = [1.0, 1.04, 1.1, 0.99, 0.98]
    events = [method.end_epoch(epoch, loss) for epoch, loss in enumerate(losses, 1)]
    assert [epoch for epoch, event in enumerate(events, 1) if event is not None] == epochs
    assert [event.loss for event in events if event is not None] == [losses[epoch - 1] for epoch in epochs]


def test_pruning_ends_at_the_target(tmp_path: Path, tiny: dict[str, Any]) -> None:
    settings = replace(OURS, tolerance=10.0, target=0.5, settle=0.0)
    summary = run(make_config("digits-fnn", pruning=settings, epochs=5, warmup_epochs=0, **tiny), RunFolder(tmp_path))
    assert summary["weights_percent"] == pytest.approx(50, abs=2)


def test_events_are_allocated_by_images_of_every_class(
    tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of images lists them class by class: the first ones would be of a few classes only."""
    monkeypatch.setattr("rlsprune.app.run.execute._WEIGHED", 20)
    config = make_config("digits-fnn", allocate=True, **tiny)
    loaded = load_data(config)
    assert loaded.valid is not None
    by_class = loaded.valid.select(loaded.valid.labels.sort().indices)
    live = Run(make_recipe(config, replace(loaded, valid=by_class)), RunFolder(tmp_path))
    seen: list[Tensor] = []
    live.result.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert isinstance(live.method, RLSPruning)
    assert live.method.pruner.held_out_loss is not None
    loss = live.method.pruner.held_out_loss()
    [images] = seen
    assert len(images) == 20
    flat = by_class.images.flatten(1)
    labels = {int(by_class.labels[int((flat - (255 * image).round()).abs().sum(1).argmin())]) for image in images}
    assert len(labels) == len(by_class.labels.unique())
    assert loss != pytest.approx(live._evaluate(by_class).loss, rel=1e-6)
