"""A pruner driven by the callback of another library's trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import ExampleInputs
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.pruner import Pruner

__all__ = ["DrivenPruner"]

# Parts of the names of metrics for which higher is better.
_RISING = re.compile(
    r"(^|[^a-z0-9])(acc|accuracy|f1|auc|auroc|auprc|precision|recall|r2|m?ap|m?iou|dice|bleu|rouge\w*|mcc|kappa|top\d+)"
    r"($|[^a-z0-9])"
)


class DrivenPruner:
    """A pruner that is told the loss at the end of an epoch, and steps when training goes on.

    So a checkpoint written between the two holds the network that was evaluated, not a smaller one. It holds no
    statistics of the network's inputs: a resumed training can prune after its first epoch, not before.

    Args:
        monitor: The metric that has to recover; None for the epoch's mean training loss.
        mode: ``"max"`` if higher values of the metric are better, ``"min"`` or None if lower ones are.
        settings: Arguments of the pruner.

    Raises:
        ValueError: There is no mode, and the metric's name suggests that higher is better: the pruner would wait for
            it to fall. Or the mode is ``"max"`` and there is no metric.
    """

    def __init__(self, monitor: str | None, mode: str | None, settings: dict[str, Any]) -> None:
        check_argument("mode", mode, lambda name: name in ("min", "max", None), '"min" or "max"')
        if mode is None and monitor is not None and _RISING.search(monitor.lower()):
            raise ValueError(
                f'monitor={monitor!r} looks like a metric for which higher is better: give mode="max", or "min"'
            )
        if mode == "max" and monitor is None:
            raise ValueError('mode="max" is for a metric, but a training loss is minimised: give monitor=')
        self._sign, self._settings = (-1 if mode == "max" else 1), settings
        self._pruner: Pruner | None = None
        self.restart_epoch()
        self._noted: float | None = None

    @property
    def started(self) -> bool:
        """Whether there is a pruner."""
        return self._pruner is not None

    @property
    def pruner(self) -> Pruner:
        """Returns the pruner, once `start` has made it."""
        if self._pruner is None:
            raise RuntimeError("there is no pruner before the Trainer has started training")
        return self._pruner

    def start(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: ExampleInputs,
        on_prune: Callable[[PruneEvent], object],
        state: dict[str, Any] | None,
    ) -> None:
        """Makes the pruner, and loads the state that a resumed training gives."""
        self._noted = None
        self._pruner = Pruner(model, optimizer, example_inputs, on_prune=on_prune, **self._settings)
        if state is not None:
            self._pruner.load_state_dict(state)

    def restart_epoch(self, total: float = 0.0, batches: int = 0) -> None:
        """Forgets the losses of this epoch's batches, or continues with those of a checkpoint."""
        self._total: Tensor | float = total
        self._batches = batches

    def epoch_so_far(self) -> dict[str, Any]:
        """Returns the sum of the batches' losses and their number, for a checkpoint."""
        return {"loss": float(self._total), "batches": self._batches}

    def add_batch(self, loss: object) -> None:
        """Adds the loss of a training batch, if it is a tensor, to the epoch's. Never waits for an accelerator."""
        if isinstance(loss, Tensor):
            self._total = self._total + loss.detach()
            self._batches += 1

    def note_metric(self, value: float) -> None:
        """Notes the monitored metric."""
        self._noted = self._sign * value

    def note_mean(self, remedy: str) -> None:
        """Notes the mean training loss of the epoch.

        Raises:
            ValueError: No batch had a loss; the message ends with the remedy.
        """
        if not self._batches:
            raise ValueError(f"no training batch of this epoch had a loss: {remedy}")
        self._noted = float(self._total) / self._batches

    def step(self) -> None:
        """Steps the pruner, if a loss was noted since the last step."""
        if self._noted is not None:
            self.pruner.step(self._noted)
            self._noted = None

    def finish(self) -> None:
        """Ends pruning: a prune now could not recover any more."""
        self.pruner.stop()
        self.step()
        self.pruner.finish()
