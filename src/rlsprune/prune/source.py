"""Where an event gets the P of each layer from: its own sample of the inputs, or the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rlsprune.distributed.ranks import Ranks
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.modes import evaluate
from rlsprune.optim.rls import RLS
from rlsprune.prune.settings import Settings
from rlsprune.statistics.inputs import InputStatistics
from rlsprune.statistics.inverse import Inverse


class InverseSource:
    """The P that scores and refits, from where ``statistics`` says.

    Args:
        model: The network.
        optimizer: Whose own P it is with ``statistics="training"``.
        settings: Whether P is needed at all, and which.
        ranks: The processes that each see a share of every batch.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, settings: Settings, ranks: Ranks | None) -> None:
        self._model, self._optimizer, self._settings = model, optimizer, settings
        sampled = settings.needs_inverse and settings.statistics == "exact"
        self._sample = InputStatistics(model, ranks=ranks) if sampled else None

    def __call__(self, name: str) -> list[Inverse]:
        """P of each group of a layer."""
        if self._sample is not None:
            return self._sample.inverses(name)
        assert isinstance(self._optimizer, RLS)
        form = self._optimizer.form(self._model.get_parameter(f"{name}.weight" if name else "weight"))
        if form is None:
            raise RuntimeError(
                f"layer {name!r} has no P yet, which starts with the first step that trains it: train first, or use "
                "statistics='exact'"
            )
        return form.inverses()

    def calibrate(self, batches: Iterable[Any], example_inputs: ExampleInputs) -> None:
        """Samples the inputs that given batches make."""
        if self._sample is None:
            raise ValueError(
                f"calibrate gathers exact statistics, which are not in use: this pruner has {self._settings}"
            )
        with self._sample.everything():
            seen = evaluate(self._model, batches, example_inputs)
        if not seen:
            raise ValueError("calibrate was given no batch")

    def restart(self, seed: int, active: bool) -> None:
        """Forgets the sample; from here on training forwards are sampled, or not: it costs a part of every step."""
        if self._sample is not None:
            self._sample.clear(seed)
            self._sample.active = active

    def close(self) -> None:
        """Removes the hooks from the model."""
        if self._sample is not None:
            self._sample.close()
