"""One run from beginning to end, or on from where it was stopped."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlsprune import data, io
from rlsprune.data.datasets import Dataset, Split, stratified_choice
from rlsprune.experiments.config import HELD_OUT_SHARE, RunConfig
from rlsprune.experiments.environment import describe_environment
from rlsprune.experiments.methods import build_method, build_model, build_optimizer, take_shape
from rlsprune.experiments.registry import experiment
from rlsprune.inputs import kept_inputs
from rlsprune.profile import count, latency
from rlsprune.prune.event import PruneEvent
from rlsprune.train.counting import count_retained, percent
from rlsprune.train.folder import RunFolder
from rlsprune.train.loop import LOSSES, Batch, EpochLoss, Evaluation, evaluate, train_epoch
from rlsprune.train.method import Retained
from rlsprune.train.observer import Observer
from rlsprune.train.record import Record, layer_rows, tail, total_percent

__all__ = ["load_data", "run"]

_EVALUATION_BATCH = 500  # images; of the paper's convolution maps it makes 130 MB


def run(config: RunConfig, folder: RunFolder, observer: Observer | None = None) -> dict[str, Any]:
    """Trains and prunes as the config says; goes on from the folder's last checkpoint if it has one.

    Args:
        config: The run.
        folder: Where its files go.
        observer: Who is told about it.

    Returns:
        The summary, as in the folder's summary.json.
    """
    observer = observer or Observer()
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    loaded = load_data(config)  # before anything is written: a folder is not left behind for want of data
    folder.write_json("config", config.to_dict())
    folder.write_json("environment", describe_environment())
    current = _Run(config, folder, loaded)
    try:
        observer.start(config.to_dict(), current.done, config.epochs, len(current.batches))
        while current.done < config.epochs:
            current.epoch(observer)
    finally:
        observer.close()
    summary = current.summary()
    io.save(current.model, folder.model, metadata={"config": config.to_dict(), "events": current.record.events})
    folder.write_json("summary", summary)
    folder.drop_old_checkpoints()
    observer.end(summary)
    return summary


def load_data(config: RunConfig) -> Dataset:
    """The experiment's data set in memory, on the run's device, cut and split as the config says."""
    loaded = data.load(experiment(config.experiment).dataset, config.data_dir, config.verify)
    if config.train_images is not None and config.train_images < len(loaded.train):
        loaded = loaded.take(config.train_images)
    if config.test_images is not None and config.test_images < len(loaded.test):
        chosen = stratified_choice(loaded.test.labels, config.test_images, seed=0)
        loaded = replace(loaded, test=loaded.test.select(chosen))
    if config.gate == "valid":
        loaded = loaded.hold_out(max(1, round(HELD_OUT_SHARE * len(loaded.train))))
    return loaded.to(config.device)


@dataclass(frozen=True)
class _Unpruned:
    """What the percentages are of."""

    counts: dict[str, Retained]
    flops: int


class _Run:
    """A run's live objects."""

    def __init__(self, config: RunConfig, folder: RunFolder, loaded: Dataset) -> None:
        self.config, self.folder, self.record, self.done = config, folder, Record(), 0
        self.data = loaded
        self.channels_last = experiment(config.experiment).convolutional
        self.loss_function = LOSSES[config.loss]
        self.batches = self._training_batches(torch.Generator().manual_seed(config.seed), len(loaded.train))
        self.example = self._example(1)
        self.model = build_model(config)
        self.unpruned = _Unpruned(count_retained(self.model, self.example), self._flops())
        saved = folder.load_checkpoint(into=self.model)
        if saved is None and config.shape_from is not None:
            take_shape(self.model, RunFolder(config.shape_from))
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = build_optimizer(config, self.model)
        self.scheduler = LambdaLR(self.optimizer, self._lr_factor)
        self.method = build_method(config, self.model, self.optimizer, self.example)
        if saved is not None:
            self._restore(*saved)
        self._write_lines()

    def epoch(self, observer: Observer) -> None:
        """Trains one epoch, prunes perhaps, and leaves a checkpoint."""
        started, epoch = time.perf_counter(), self.done + 1
        if self.method.settled and self.data.valid is not None:
            self._reunite()

        def on_batch(number: int, loss: Tensor) -> None:
            self.scheduler.step()
            observer.batch(number, loss)

        losses = train_epoch(
            self.model, self.optimizer, self._noisy(self.batches), self.loss_function, self.method, on_batch
        )
        gate_loss = self._gate_loss(losses)
        test = self._evaluate(self.data.test)
        event = None if gate_loss is None else self.method.end_epoch(epoch, gate_loss)
        test = self._note(epoch, event, test, observer)
        if epoch == self.config.epochs:
            test = self._note(epoch, self.method.finish(), test, observer)
        counts = dict(self.method.retained())
        nodes_percent, weights_percent = total_percent(counts, self.unpruned.counts)
        self.record.add_epoch(
            {
                "epoch": epoch,
                "train_loss": losses.mean,
                "gate_loss": gate_loss,
                "test_loss": test.loss,
                "precision": test.precision,
                "nodes_percent": nodes_percent,
                "weights_percent": weights_percent,
                "flops_percent": percent(self._flops(), self.unpruned.flops),
                "seconds": time.perf_counter() - started,
            }
        )
        self.done = epoch
        self.folder.save_checkpoint(epoch, self.model, self._state())
        self._write_lines()
        observer.epoch(self.record.metrics[-1], counts)

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers."""
        metrics, events = self.record.metrics, self.record.events
        last, final = tail(metrics, events), metrics[-1]
        images = self._example(self.config.batch_size)
        # Both now, one after the other: other work on the machine then slows them alike.
        unpruned_ms, _ = latency(build_model(self.config), images)
        latency_ms, spread = latency(self.model, images)
        return {
            "experiment": self.config.experiment,
            "method": self.config.method,
            "optimizer": self.config.optimizer,
            "preset": self.config.preset,
            "seed": self.config.seed,
            "epochs": self.config.epochs,
            "precision": statistics.fmean(line["precision"] for line in last),
            "loss": statistics.fmean(line["test_loss"] for line in last),
            "final_precision": final["precision"],
            "nodes_percent": final["nodes_percent"],
            "weights_percent": final["weights_percent"],
            "flops_percent": final["flops_percent"],
            "latency_ms": latency_ms,
            "latency_iqr_ms": spread,
            "latency_unpruned_ms": unpruned_ms,
            "latency_batch": self.config.batch_size,
            "seconds": sum(line["seconds"] for line in metrics),
            "events": sum(event["kind"] == "prune" for event in events),
            "kept_inputs": _kept_inputs(self.model),
            "layers": layer_rows(self.method.retained(), self.unpruned.counts),
        }

    def _note(self, epoch: int, event: PruneEvent | None, before: Evaluation, observer: Observer) -> Evaluation:
        """Evaluates again if something was pruned."""
        if event is None:
            return before
        after = self._evaluate(self.data.test)
        observer.event(self.record.add_event(epoch, event, before, after))
        return after

    def _gate_loss(self, losses: EpochLoss) -> float | None:
        """What decides on the next prune; None when there is none to decide on."""
        if self.config.gate == "valid":
            return None if self.data.valid is None else self._evaluate(self.data.valid).loss
        return losses.mean if self.config.gate == "train" else losses.last

    def _reunite(self) -> None:
        """From now on trains on the held-out images too, in epochs of as many images as before."""
        held_in = len(self.data.train)
        self.data = self.data.reunite()
        self.batches = self._training_batches(self.batches.generator, held_in)

    def _training_batches(self, generator: torch.Generator, images_per_epoch: int) -> data.Batches:
        return data.Batches(
            self.data.train.images,
            self.data.train.labels,
            self.config.batch_size,
            generator=generator,
            images_per_epoch=images_per_epoch,
            augment=self.config.augment,  # type: ignore[arg-type]  # checked by the config
            channels_last=self.channels_last,
        )

    def _evaluate(self, split: Split) -> Evaluation:
        batches = data.Batches(
            split.images, split.labels, _EVALUATION_BATCH, shuffle=False, channels_last=self.channels_last
        )
        return evaluate(self.model, self._inputs(batches), self.loss_function)

    def _inputs(self, batches: data.Batches) -> Iterator[Batch]:
        """As the network takes them: images, or flat features."""
        return ((images if self.channels_last else images.flatten(1), labels) for images, labels in batches)

    def _noisy(self, batches: data.Batches) -> Iterator[Batch]:
        """As the network takes them in training."""
        share = self.config.training.input_noise
        for inputs, labels in self._inputs(batches):
            if share:
                # Drawn on the CPU, whose random state the checkpoint has, so that a run goes on alike on every device.
                kept = (torch.rand(inputs.shape) >= share).to(inputs.device)
                inputs = inputs * kept / (1 - share)
            yield inputs, labels

    def _lr_factor(self, step: int) -> float:
        """Of the learning rate, at a step counted from the beginning of the run."""
        steps = self.config.epochs * len(self.batches)
        falling = self.config.training.lr_decay * steps
        return min(1.0, (steps - step) / falling) if falling else 1.0

    def _flops(self) -> int:
        return count(self.model, self.example)[1]

    def _example(self, images: int) -> Tensor:
        example = torch.zeros(images, *self.data.shape, device=self.config.device)
        return example.to(memory_format=torch.channels_last) if self.channels_last else example.flatten(1)

    def _state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "method": self.method.state_dict(),
            "batches": self.batches.state_dict(),
            "record": self.record.state_dict(),
            "random": torch.get_rng_state(),
        }

    def _restore(self, epoch: int, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.method.load_state_dict(state["method"])
        self.batches.load_state_dict(state["batches"])
        self.record.load_state_dict(state["record"])
        torch.set_rng_state(state["random"])
        self.done = epoch

    def _write_lines(self) -> None:
        self.folder.write_lines("metrics", self.record.metrics)
        self.folder.write_lines("events", self.record.events)


def _kept_inputs(model: nn.Module) -> list[int] | None:
    for layer in model.modules():
        kept = kept_inputs(layer)
        if kept is not None:
            return [int(index) for index in kept]
    return None
