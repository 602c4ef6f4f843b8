"""A run for TensorBoard: scalars and histograms, epoch by epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlsprune.app.config.metrics import METRICS
from rlsprune.app.run.observer import Observer

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

    from rlsprune.app.run.method import Retained

__all__ = ["TensorBoardObserver"]

_SCALARS = {
    "loss/train": "train_loss",
    "loss/test": "test_loss",
    "loss/gate": "gate_loss",
    "loss/gate level": "gate_level",
    "retained/weights %": "weights_percent",
    "retained/FLOPs %": "flops_percent",
    "seconds per epoch": "seconds",
}


class TensorBoardObserver(Observer):
    """Writes an event file; needs the package tensorboard. A run that goes on does so in the same curves.

    Args:
        folder: Where the file goes; ``tensorboard --logdir`` that folder, or one above it, shows it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401  # missing: say so before the run

        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None
        self._model: nn.Module | None = None

    def start(self, config: Mapping[str, Any], done: int, epochs: int, batches: int) -> None:
        """Opens the file; what an earlier part of the run wrote of later epochs is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=done + 1)

    def network(
        self, model: nn.Module, layers: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps the network for its histograms."""
        self._model = model

    def epoch(self, metrics: Mapping[str, Any], counts: Mapping[str, Retained]) -> None:
        """Figures, what is left of every layer, and the weights."""
        if self._writer is None:
            return
        epoch = metrics["epoch"]
        scores = {name: name for name in METRICS if name in metrics}
        for tag, key in {**_SCALARS, **scores}.items():
            if metrics.get(key) is not None:
                self._writer.add_scalar(tag, metrics[key], epoch)
        for name, count in counts.items():
            self._writer.add_scalar(f"channels/{name}", count.channels, epoch)
        for name, parameter in self._model.named_parameters() if self._model is not None else ():
            self._writer.add_histogram(name.replace(".", "/"), parameter.detach().float().cpu(), epoch)
        self._writer.flush()  # whoever watches sees it now

    def event(self, event: Mapping[str, Any]) -> None:
        """What went, in words."""
        if self._writer is not None:
            changes = ", ".join(f"{layer['name']} {layer['before']} → {layer['after']}" for layer in event["layers"])
            self._writer.add_text("events", f"{event['kind']}: {changes}", event["epoch"])

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
