"""The pruner inside a trainer's callback: which loss it is told, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlsprune.prune.driven import DrivenPruner


def driven(monitor: str | None = None, mode: str | None = "min") -> DrivenPruner:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    made = DrivenPruner(monitor, mode, {"warmup_epochs": 0, "criterion": "l1", "compensate": False})
    made.start(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(1, 4), lambda event: None, None)
    return made


def test_the_mean_of_an_epoch_is_told_once_when_training_goes_on() -> None:
    callback = driven()
    for loss in (torch.tensor(1.0), None, torch.tensor(2.0)):
        callback.add_batch(loss)
    callback.note_mean("")
    assert not callback.pruner.history, "a checkpoint now holds the network that was evaluated"
    callback.step()
    callback.step()
    assert [event.loss for event in callback.pruner.history] == [1.5]


def test_a_metric_of_which_more_is_better_is_told_with_the_other_sign() -> None:
    callback = driven("accuracy", "max")
    callback.note_metric(0.9)
    callback.step()
    assert callback.pruner.history[0].loss == -0.9


def test_an_epoch_goes_on_from_a_checkpoint() -> None:
    first, second = driven(), driven()
    first.add_batch(torch.tensor(3.0))
    saved = first.epoch_so_far()
    second.restart_epoch(saved["loss"], saved["batches"])
    second.add_batch(torch.tensor(1.0))
    second.note_mean("")
    second.step()
    assert second.pruner.history[0].loss == 2.0


def test_faults_are_told() -> None:
    with pytest.raises(RuntimeError, match="before the Trainer has started"):
        _ = DrivenPruner(None, "min", {}).pruner
    with pytest.raises(ValueError, match="no training batch of this epoch had a loss: return it"):
        driven().note_mean("return it")
    with pytest.raises(ValueError, match="give monitor="):
        DrivenPruner(None, "max", {})


@pytest.mark.parametrize("name", ["accuracy", "val_acc", "eval_f1", "Val/AUROC", "rougeL", "test.top5", "mAP", "acc@1"])
def test_a_metric_that_rises_needs_its_mode(name: str) -> None:
    with pytest.raises(ValueError, match=r"for which higher is better: give mode=\"max\""):
        DrivenPruner(name, None, {})
    DrivenPruner(name, "min", {})


@pytest.mark.parametrize("name", ["val_loss", "eval_perplexity", "error", "mape", "space_loss", "mse", "brier_score"])
def test_other_metrics_fall(name: str) -> None:
    callback = driven(name, None)
    callback.note_metric(0.5)
    callback.step()
    assert callback.pruner.history[0].loss == 0.5
