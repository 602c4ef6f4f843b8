"""One run, from its beginning or its last checkpoint to its end."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlsprune.app.data.datasets import Split, stratified_choice
from rlsprune.app.run.clock import CpuClock
from rlsprune.app.run.counting import count_retained, percent
from rlsprune.app.run.determinism import deterministic
from rlsprune.app.run.environment import describe_environment
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.method import Retained
from rlsprune.app.run.observer import Observer
from rlsprune.app.run.randomness import RandomStates
from rlsprune.app.run.recipe import Recipe
from rlsprune.app.run.record import Record, layer_rows, total_percent
from rlsprune.app.run.scores import Scored
from rlsprune.app.run.share import Share
from rlsprune.app.run.summary import summarise
from rlsprune.distributed.ranks import find_ranks
from rlsprune.io.atomic import FileError
from rlsprune.model.counts import count
from rlsprune.prune.event import PruneEvent
from rlsprune.training.average import MovingAverage
from rlsprune.training.guard import MAX_ROLLBACKS, FaultError, Guard, rollbacks
from rlsprune.training.loop import EpochLoss, in_bfloat16, train_epoch

__all__ = ["Run", "train_and_prune"]

_WEIGHED = 512  # held-out images that measure the cost of cutting a layer


def train_and_prune(recipe: Recipe, folder: RunFolder, observer: Observer | None = None) -> dict[str, Any]:
    """Trains and prunes as the recipe says; resumes from the folder's last checkpoint if there is one.

    Args:
        recipe: The parts of the run.
        folder: The folder of its files.
        observer: Observer of the run.

    Returns:
        The summary that the folder's summary.json holds.

    Raises:
        FaultError: There was a numerical fault and `on_fault` does not continue. The run is saved up to the epoch
            before.
        InUseError: Another process runs in that folder.
        StorageError: A file could not be written. Earlier files are intact, and the run can be resumed.
    """
    with folder.locked(), deterministic() if recipe.deterministic else contextlib.nullcontext():
        return _train_and_prune(recipe, folder, observer or Observer())


def _train_and_prune(recipe: Recipe, folder: RunFolder, observer: Observer) -> dict[str, Any]:
    torch.set_num_threads(recipe.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    current = Run(recipe, folder)  # a network that cannot be pruned leaves no run behind
    folder.write_json("config", recipe.config)
    folder.write_json("environment", describe_environment())
    try:
        observer.start(recipe.config, current.done, recipe.epochs, len(current.batches))
        observer.network(current.result, current.layers(), current.record.metrics)
        while not current.over:
            try:
                current.epoch(observer)
            except FloatingPointError as error:
                current = current.after_fault(error)
                observer.network(current.result, current.layers(), current.record.metrics)
    finally:
        observer.close()
    summary = current.share.by_first(partial(summarise, current))
    folder.save_model(
        recipe.delivered(current.result), {"config": dict(recipe.config), "events": current.record.events}
    )
    folder.write_json("summary", summary)
    folder.drop_old_checkpoints()
    observer.end(summary)
    return summary


@dataclass(frozen=True)
class _Unpruned:
    """The counts of the unpruned network, the reference of all percentages."""

    counts: dict[str, Retained]
    flops: int


class Run:
    """A run's live objects.

    Args:
        recipe: The parts of the run.
        folder: The run's folder, with the checkpoint to resume from if there is one.
        faults: The faults so far; each roll-back among them halves the learning rate.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, faults: Sequence[dict[str, Any]] = ()) -> None:
        self.recipe, self.folder, self.done = recipe, folder, 0
        self.record = Record(recipe.scoring.metric)
        self.share = Share(find_ranks())
        if recipe.cpu_seconds is not None and self.share.ranks is not None:
            raise ValueError("--cpu-seconds counts the time of one process: give --epochs, or run it without torchrun")
        self.clock = CpuClock()
        """The time of training, pruning and the gate's loss, without that of the test images."""
        self.data = recipe.data
        self.batches = recipe.training_batches(
            self.data.train, torch.Generator().manual_seed(recipe.seed), len(self.data.train)
        )
        self.example = recipe.example()
        self._randomness = RandomStates(self.share, self.example.device, recipe.seed)
        self.model = recipe.build_model()
        self.unpruned = _Unpruned(count_retained(self.model, self.example), self._flops())
        saved = self._load_checkpoint()
        if saved is None:
            recipe.prepare(self.model)
        recipe.in_layout(self.model)
        steps = recipe.training.average * len(self.batches)
        self._average = MovingAverage(self.model, steps) if steps else None
        self.guard = Guard(self.model, recipe.on_fault, alone=self.share.ranks is None)
        self.optimizer = recipe.build_optimizer(self.model)
        self.scheduler = LambdaLR(self.optimizer, self._lr_factor)
        self.method = recipe.build_method(self.model, self.optimizer, self.example)
        if self._average is not None:
            self.method.follow(self._average.network)
        if self.data.valid is not None:
            self.method.weigh_by(self._held_out_loss)
        self._randomness.draw_apart(0)
        if saved is not None:
            with _fitting(folder):
                self._restore(*saved)
        if faults:
            self._shorten_step(faults)
        self.network = self.share.wrapped(self.model)
        self._write_lines()

    def epoch(self, observer: Observer) -> None:
        """Trains one epoch, may prune, and saves a checkpoint."""
        started, epoch = time.perf_counter(), self.done + 1
        before = self.clock.used
        self.clock.start()
        if self.method.settled and self.data.valid is not None:
            self._reunite()

        events = self.record.events
        self.guard.start_epoch(epoch, after_prune=bool(events) and events[-1]["epoch"] == self.done)

        def on_batch(number: int, loss: Tensor) -> None:
            self.scheduler.step()
            if self._average is not None:
                self._average.update(self.model)
            observer.batch(number, loss)

        if self.recipe.trains:
            forward = in_bfloat16(self.network) if self.recipe.bfloat16 else self.network
            losses = train_epoch(
                self.network,
                self.optimizer,
                self._batches_in_time(),
                self.share.loss_of(forward, self.recipe.loss),
                guard=self.guard,
                after_backward=self.method.after_backward,
                after_step=self.method.after_step,
                on_batch=on_batch,
            )
        else:
            losses = EpochLoss(*[self._evaluate(self.data.train).loss] * 2)
        losses = EpochLoss(*self.share.means(list(losses)))
        self.guard.epoch_loss("training", losses.mean)
        for network in dict.fromkeys((self.model, self.result)):
            self.share.align(network)
        gate_loss = self._gate_loss(losses)
        if gate_loss is not None:
            self.guard.epoch_loss("gate's", gate_loss)
        test = self._evaluate(self.data.test)
        if self.recipe.cpu_seconds is not None:
            self.method.spent(self.spent)
        event = None if gate_loss is None else self.method.end_epoch(epoch, gate_loss)
        self.clock.stop()
        self.done = epoch
        test = self._note(epoch, event, test, observer)
        if self.over:
            test = self._note(epoch, self.method.finish(), test, observer)
        self.guard.epoch_loss("test", test.loss)
        counts = dict(self.method.retained())
        nodes_percent, weights_percent = total_percent(counts, self.unpruned.counts)
        self.record.add_epoch(
            {
                "epoch": epoch,
                "train_loss": losses.mean,
                "gate_loss": gate_loss,
                "test_loss": test.loss,
                **test.scores,
                "nodes_percent": nodes_percent,
                "weights_percent": weights_percent,
                "flops_percent": percent(self._flops(), self.unpruned.flops),
                "seconds": time.perf_counter() - started,
                "cpu_seconds": self.clock.used - before,
                "gate_level": self.method.gate_level(),
                "pruned": any(event["epoch"] == epoch for event in self.record.events),
                "pruning_ended": self.method.ended,
                "layers": layer_rows(counts, self.unpruned.counts),
            }
        )
        self.share.changed(self.network)
        self.share.verify(self.model, self.result, self.optimizer)
        self.folder.save_checkpoint(epoch, self.model, self._state())
        self._write_lines()
        observer.epoch(self.record.metrics[-1], counts)

    def after_fault(self, error: FloatingPointError) -> Run:
        """Rolls back to the last checkpoint, or to the one before the prune right after a prune, with half the rate.

        Raises:
            FaultError: The run has to stop, or was already rolled back too often.
        """
        faults = self.guard.noted(error)
        self.folder.write_lines("faults", faults)
        rolled_back = rollbacks(faults)
        if self.recipe.on_fault != "rollback" or rolled_back > MAX_ROLLBACKS:
            tried = f", and {MAX_ROLLBACKS} roll-backs did not help" if rolled_back else ""
            where = f"{self.folder.path} is saved up to epoch {self.done}{tried}"
            raise FaultError(str(error), where, "resume it, perhaps with another --on-fault") from error
        if self.guard.after_prune:
            self.folder.set_checkpoint_aside()  # its pruned network may have caused the fault
        earlier = Run(self.recipe, self.folder, faults)
        warnings.warn(
            f"{error}; back to epoch {earlier.done} with {0.5**rolled_back:g} of the learning rate", stacklevel=2
        )
        return earlier

    @property
    def result(self) -> nn.Module:
        """Returns the network that is evaluated and kept: the one that is trained, or its moving average."""
        return self.model if self._average is None else self._average.network

    @property
    def spent(self) -> float:
        """Returns the share of the run that is over, by processor time if that is limited, else by epochs."""
        limit = self.recipe.cpu_seconds
        return self.done / self.recipe.epochs if limit is None else self.clock.used / limit

    @property
    def over(self) -> bool:
        """Returns whether the last epoch is done."""
        return self.spent >= 1

    def layers(self) -> list[dict[str, Any]]:
        """Returns the present sizes of every layer."""
        return layer_rows(self.method.retained(), self.unpruned.counts)

    def _note(self, epoch: int, event: PruneEvent | None, before: Scored, observer: Observer) -> Scored:
        """Evaluates again if something was pruned."""
        if event is None:
            return before
        after = self._evaluate(self.data.test)
        observer.event(self.record.add_event(epoch, event, before, after))
        return after

    def _gate_loss(self, losses: EpochLoss) -> float | None:
        """Returns the loss that decides on the next prune; None if no held-out images are left for it."""
        if self.recipe.gate == "valid":
            return None if self.data.valid is None else self._evaluate(self.data.valid).loss
        return losses.mean if self.recipe.gate == "train" else losses.last

    def _held_out_loss(self) -> float:
        """Computes the loss on a few held-out images of every class; it is called many times in a row."""
        valid = self.data.valid
        assert valid is not None
        return self._evaluate(valid.select(stratified_choice(valid.labels, min(_WEIGHED, len(valid)), seed=0))).loss

    def _reunite(self) -> None:
        """Trains on the held-out images too from now on, in epochs of as many images as before."""
        held_in = len(self.data.train)
        self.data = self.data.reunite()
        self.batches = self.recipe.training_batches(self.data.train, self.batches.generator, held_in)

    def _evaluate(self, split: Split) -> Scored:
        batches, scoring = self.recipe.evaluation_batches(split), self.recipe.scoring
        if split is not self.data.test:
            return scoring.loss_alone(self.result, batches, self.recipe.loss, self.share)
        with self.clock.paused():
            return scoring(self.result, batches, self.recipe.loss, self.share)

    def _load_checkpoint(self) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest sound checkpoint. Rank 0 goes first, because it may set a damaged one aside."""
        ranks = self.share.ranks
        if ranks is not None and ranks.rank > 0:
            ranks.gather(None)
        saved = self.folder.load_checkpoint(into=self.model)
        if ranks is not None:
            if ranks.rank == 0:
                ranks.gather(None)
            ranks.agree("the epoch to resume from", None if saved is None else saved[0])
        return saved

    def _batches_in_time(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the epoch's batches, at least one, until the processor time is used up."""
        for batch in self.batches:
            yield batch
            if self.recipe.cpu_seconds is not None and self.over:
                return

    def _lr_factor(self, step: int) -> float:
        """Computes the factor of the learning rate at a step, counted from the beginning of the run."""
        scale, decay = 0.5 ** rollbacks(self.guard.faults), self.recipe.training.lr_decay
        if not decay:
            return scale
        if self.recipe.cpu_seconds is not None:
            return scale * min(1.0, max(0.0, 1 - self.spent) / decay)
        steps = self.recipe.epochs * len(self.batches)
        return scale * min(1.0, (steps - step) / (decay * steps))

    def _shorten_step(self, faults: Sequence[dict[str, Any]]) -> None:
        """Shortens the next step; later steps get their rate from `_lr_factor`."""
        missing = rollbacks(faults) - rollbacks(self.guard.faults)
        self.guard.faults = list(faults)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5**missing

    def _flops(self) -> int:
        return count(self.model, self.example)[1]

    def _state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "method": self.method.state_dict(),
            "batches": self.batches.state_dict(),
            "record": self.record.state_dict(),
            "guard": self.guard.state_dict(),
            "cpu_seconds": self.clock.used,
            **self._randomness.state_dict(),
        }

    def _restore(self, epoch: int, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.method.load_state_dict(state["method"])
        self.batches.load_state_dict(state["batches"])
        self.record.load_state_dict(state["record"])
        self.guard.load_state_dict(state["guard"])
        self.clock = CpuClock(state.get("cpu_seconds", 0.0))  # 0.1.0 did not count it
        self._randomness.load_state_dict(state, epoch)
        self.done = epoch

    def _write_lines(self) -> None:
        self.folder.write_lines("metrics", self.record.metrics)
        self.folder.write_lines("events", self.record.events)
        if self.guard.faults:
            self.folder.write_lines("faults", self.guard.faults)


@contextlib.contextmanager
def _fitting(folder: RunFolder) -> Iterator[None]:
    """Turns any error of loading into a FileError; a state with sound checksums may still be of another run."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        problem = f"its checkpoint does not fit this run ({type(error).__name__}: {error})"
        raise FileError(folder.path, problem, "resume it with the version and settings that wrote it") from error
