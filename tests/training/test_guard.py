"""Numbers that are not finite, and losses that diverge: found in the step, named, raised, skipped or rolled back."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.run.tiny import SETTINGS, build_model, numbers, split, tiny_recipe
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data.datasets import Split
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.pruning import RLSPruning
from rlsprune.prune.event import PruneEvent
from rlsprune.training.guard import FaultError, Guard

BATCHES = 3  # per epoch


pytestmark = pytest.mark.usefixtures("quick_runs")


class Once:
    """Does something at the n-th call, counted over the whole test, and never again."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at, self.times, self.calls = at, times, 0

    def __call__(self) -> bool:
        self.calls += 1
        return self.at <= self.calls < self.at + self.times


class Saboteur(RLSPruning):
    """Spoils the gradient, P or the pruned network when it is told to."""

    def __init__(self, optimizer: Any, *args: Any, **spoil: Once) -> None:
        super().__init__(args[0], optimizer, *args[1:])
        self.optimizer, self.spoil = optimizer, spoil

    def after_backward(self) -> None:
        if "gradient" in self.spoil and self.spoil["gradient"]():
            self.model.get_parameter("2.weight").grad[0, 0] = math.inf

    def after_step(self) -> None:
        if "P" in self.spoil and self.spoil["P"]():
            self.optimizer.inverse("0").fill_(math.nan)

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        event = super().end_epoch(epoch, loss)
        if "prune" in self.spoil and self.spoil["prune"]():
            with torch.no_grad():
                self.model.get_parameter("2.weight").mul_(1e4)
        return event


def sabotaged(on_fault: str, epochs: int = 4, build: Callable[..., Any] | None = None, **spoil: Once) -> Any:
    changes: dict[str, Any] = {} if build is None else {"build_optimizer": build}
    if "loss" in spoil:
        nan = spoil.pop("loss")

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            value = mean_squared_error(outputs, labels)
            return value * math.nan if outputs.requires_grad and nan() else value

        changes["loss"] = loss
    return tiny_recipe(
        epochs=epochs,
        on_fault=on_fault,
        build_method=lambda model, optimizer, example: Saboteur(
            optimizer, model, example, SETTINGS, epochs, 0, **spoil
        ),
        **changes,
    )


SGD = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
CASES: dict[str, tuple[Callable[[], dict[str, Once]], Callable[..., Any] | None, str]] = {
    "loss": (lambda: {"loss": Once(8)}, None, "the loss is nan"),
    "gradient": (lambda: {"gradient": Once(8)}, None, "not finite: the gradient of layer '2'"),
    "gradient, SGD": (lambda: {"gradient": Once(8)}, SGD, "the gradient of '2.weight' is not finite"),
    "P": (lambda: {"P": Once(7)}, None, "not positive definite: P of layer '0'"),
}
WHERE = "epoch 3, batch 2: "  # the eighth step


@pytest.mark.parametrize("case", CASES)
def test_fault_stops_the_run_in_its_step_with_everything_saved(tmp_path: Path, case: str) -> None:
    spoil, build, said = CASES[case]
    folder = RunFolder(tmp_path)
    with pytest.raises(FaultError, match=f"is saved up to epoch 2: {WHERE}{said}"):
        train_and_prune(sabotaged("raise", build=build, **spoil()), folder)
    assert [line["epoch"] for line in folder.read_lines("metrics")] == [1, 2]
    assert [(line["epoch"], line["batch"], line["action"]) for line in folder.read_lines("faults")] == [
        (3, 2, "stopped")
    ]
    # And it goes on from there as if nothing had been: the same numbers as a run without the fault.
    train_and_prune(sabotaged("raise", build=build), folder)
    whole = RunFolder(tmp_path / "whole")
    train_and_prune(sabotaged("raise", build=build), whole)
    assert numbers(folder) == numbers(whole)


def test_news_of_the_last_steps_is_waited_for_before_the_epoch_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on an accelerator that is slow to tell.
    monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    monkeypatch.setattr("rlsprune.optim.faults._Look.arrived", False)
    folder = RunFolder(tmp_path)
    with pytest.raises(FaultError, match=r"is saved up to epoch 3: epoch 4, batch 3: not finite: the gradient"):
        train_and_prune(sabotaged("raise", gradient=Once(4 * BATCHES)), folder)
    with pytest.warns(UserWarning, match="epoch 4, batch 3: not finite: the gradient.*was skipped"):
        train_and_prune(sabotaged("skip", gradient=Once(4 * BATCHES)), RunFolder(tmp_path / "skipped"))
    assert RunFolder(tmp_path / "skipped").finished


@pytest.mark.parametrize("case", ["loss", "gradient", "gradient, SGD"])
def test_skipped_batch_changes_nothing_and_is_named(tmp_path: Path, case: str) -> None:
    spoil, build, said = CASES[case]
    folder = RunFolder(tmp_path)
    with pytest.warns(UserWarning, match=f"{WHERE}{said}.*the batch was skipped") as caught:
        train_and_prune(sabotaged("skip", build=build, **spoil()), folder)
    assert len(caught) == 1
    assert [line["action"] for line in folder.read_lines("faults")] == ["skipped"]
    assert all(math.isfinite(line["train_loss"]) for line in folder.read_lines("metrics"))


def test_spoilt_p_is_skipped_until_a_prune_needs_it(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match=r"not positive definite: P .* the batch was skipped") as caught,
        pytest.raises(FaultError, match=r"is saved up to epoch 2: P is not positive definite"),
    ):
        train_and_prune(sabotaged("skip", epochs=6, P=Once(7)), RunFolder(tmp_path))
    assert len(caught) == 2


def test_batches_cannot_be_skipped_for_ever(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="the batch was skipped") as caught,
        pytest.raises(FaultError, match="epoch 1, batch 11: the loss is nan"),
    ):
        train_and_prune(replace(sabotaged("skip", loss=Once(1, 1000)), batch_size=4), RunFolder(tmp_path / "a"))
    # One more is torch's own: the first step was left out, so its scheduler stepped before the optimizer.
    assert sum("the batch was skipped" in str(line.message) for line in caught) == 10
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(FaultError, match="3 batches: every batch was left out"),
    ):
        train_and_prune(sabotaged("skip", loss=Once(1, 1000)), RunFolder(tmp_path / "b"))


@pytest.mark.parametrize("case", CASES)
def test_roll_back_goes_on_from_the_last_checkpoint_with_half_the_step(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, build, said = CASES[case]
    rates: list[float] = []
    original = Guard.step

    def step(guard: Guard, optimizer: torch.optim.Optimizer) -> bool:
        rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["initial_lr"])
        return original(guard, optimizer)

    monkeypatch.setattr(Guard, "step", step)
    folder = RunFolder(tmp_path)
    # The epoch before ended with a prune, so the run goes back to where it had not been pruned.
    with pytest.warns(UserWarning, match=f"{WHERE}{said}.*back to epoch [12] with 0.5 of the learning rate"):
        train_and_prune(sabotaged("rollback", build=build, **spoil()), folder)
    assert [line["epoch"] for line in folder.read_lines("metrics")] == [1, 2, 3, 4]
    assert [line["action"] for line in folder.read_lines("faults")] == ["rolled back"]
    assert rates[0] == 1
    assert rates[-BATCHES * 2] <= 0.5


def test_spoilt_prune_is_undone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.warns(
        UserWarning, match=r"epoch 3, batch 1: the loss has risen to .* after the prune.*back to epoch 1"
    ):
        train_and_prune(sabotaged("rollback", prune=Once(2)), folder)
    assert [line["epoch"] for line in folder.read_lines("metrics")] == [1, 2, 3, 4]
    assert max(line["train_loss"] for line in folder.read_lines("metrics")) < 1
    assert (tmp_path / "checkpoint" / "spoilt-epoch-000002").is_dir()


def test_learning_rate_that_diverges_is_named_before_anything_overflows(tmp_path: Path) -> None:
    recipe = tiny_recipe(on_fault="raise", build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=50.0))
    with pytest.raises(FaultError, match=r"epoch 1, batch \d: the loss has risen to .* the training has diverged"):
        train_and_prune(recipe, RunFolder(tmp_path))


def test_roll_backs_are_bounded(tmp_path: Path) -> None:
    build = lambda model: torch.optim.SGD(model.parameters(), lr=1e6)  # noqa: E731
    recipe = tiny_recipe(on_fault="rollback", build_optimizer=build)
    said = r"saved up to epoch 0, and 3 roll-backs did not help: epoch 1, batch \d"
    with pytest.warns(UserWarning, match="of the learning rate") as caught, pytest.raises(FaultError, match=said):
        train_and_prune(recipe, RunFolder(tmp_path))
    assert [str(line.message).rpartition("with ")[2] for line in caught] == [
        f"{0.5**number:g} of the learning rate" for number in (1, 2, 3)
    ]
    assert len(RunFolder(tmp_path).read_lines("faults")) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("on_fault", ["raise", "skip", "rollback"])
def test_data_that_are_not_finite_never_reach_the_network(tmp_path: Path, value: float, on_fault: str) -> None:
    recipe = tiny_recipe(on_fault=on_fault)
    clean = split(48, 1)
    images = clean.images.clone()
    images[5, 3] = value
    object.__setattr__(recipe.data, "train", Split(images, clean.labels))
    folder = RunFolder(tmp_path)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        if on_fault == "skip":
            train_and_prune(recipe, folder)
            assert [line["what"] for line in folder.read_lines("faults")] == [
                "the batch holds a NaN or an infinity"
            ] * 3
            assert all(math.isfinite(line["test_loss"]) for line in folder.read_lines("metrics"))
        else:
            with pytest.raises(FaultError, match=r"epoch 1, batch \d: the batch holds a NaN or an infinity; look at"):
                train_and_prune(recipe, folder)


def test_fault_survives_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(FaultError("the loss is nan", "epoch 1, batch 2", "look")))
    assert str(error) == "epoch 1, batch 2: the loss is nan; look"


def test_epoch_without_a_sound_batch_is_an_error() -> None:
    guard = Guard(build_model(), "skip")
    guard.start_epoch(1, after_prune=False)
    with pytest.warns(UserWarning, match="skipped"):
        assert not guard.inputs(torch.tensor([math.nan]))
    with pytest.raises(FaultError, match="end of epoch 1: the training loss is inf"):
        guard.epoch_loss("training", math.inf)


def test_sparse_gradients_are_looked_at_too() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, "raise")
    guard.start_epoch(1, after_prune=False)
    model(torch.tensor([1, 3])).sum().backward()
    assert guard.step(optimizer)
    optimizer.zero_grad()
    (model(torch.tensor([1, 3])).sum() * math.inf).backward()
    model[1].zero_grad()
    with pytest.raises(FaultError, match=r"the gradient of '0\.weight' is not finite"):
        guard.step(optimizer)
