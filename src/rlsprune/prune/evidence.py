"""The evidence that decides an event: P of every layer's inputs, and the inputs that the network has just seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlsprune.model.arguments import check_iterable
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.modes import evaluate
from rlsprune.model.progress import shown_progress, watched
from rlsprune.optim.rls import RLS
from rlsprune.prune.original import Original, has_batch_norms
from rlsprune.prune.settings import Settings
from rlsprune.prune.surgery import LiveNetwork
from rlsprune.reconstruction.recent import RecentInputs
from rlsprune.statistics.inputs import InputStatistics
from rlsprune.statistics.inverse import Inverse, inverses_of

__all__ = ["Evidence"]


class Evidence:
    """Statistics gathered from a network in training by hooks, as far as the settings need them.

    Args:
        network: The network to watch.
        example_inputs: Inputs of the network.
        settings: The settings of the events.
    """

    def __init__(self, network: LiveNetwork, example_inputs: ExampleInputs, settings: Settings) -> None:
        self._network, self._example_inputs, self._settings = network, example_inputs, settings
        sampled = settings.needs_inverse and settings.statistics == "exact"
        self.sample = InputStatistics(network.model, ranks=network.ranks) if sampled else None
        """Statistics of the inputs of each layer; None if P is not needed, or if the optimizer's own P is used."""
        alone = network.ranks is None and not network.divided
        refitted = settings.compensate and alone and has_batch_norms(network.model)
        self.recent = RecentInputs(network.model, self.sample.watches) if self.sample and refitted else None
        """The network's most recent inputs; None if events are made layer by layer."""

    def inverses(self, name: str) -> list[Inverse]:
        """Returns P of each group of a layer: that of the sampled inputs, or the optimizer's own."""
        if self.sample is not None:
            return self.sample.inverses(name)
        optimizer = self._network.optimizer
        assert isinstance(optimizer, RLS)
        form = optimizer.form(self._network.model.get_parameter(f"{name}.weight" if name else "weight"))
        if form is None:
            raise RuntimeError(
                f"layer {name!r} has no P yet: it gets one in the first step that trains it. Train first, or use "
                "statistics='exact'"
            )
        return inverses_of(form)

    def original(self, choosing: bool) -> Original | None:
        """Returns the network before the event, to refit to and perhaps to choose by; None for events layer by layer.

        Args:
            choosing: Whether the network also chooses the units that go.

        Raises:
            ValueError: No inputs were kept, or the network cannot be copied, does not run on a part of a batch, calls
                different layers for different inputs, or has numbers that are not finite.
        """
        if self.recent is None:
            return None
        original = Original(self._network, self.recent.calibration())
        return original if not choosing or original.curves else None

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Samples the layers' inputs while the network runs on given batches."""
        if self.sample is None:
            reason = "statistics='training'" if self._settings.needs_inverse else "no P is needed for its settings"
            raise ValueError(
                f"calibrate() gathers exact statistics, which this pruner does not use ({reason}): leave it out"
            )
        check_iterable("batches", batches, "give a list of batches or a DataLoader")
        with self.sample.everything(), shown_progress() as tell:
            seen = evaluate(self._network.model, watched(batches, "calibrating", tell), self._example_inputs)
        if not seen:
            raise ValueError("calibrate() got no batch: give it some batches of inputs")

    def restart(self, seed: int, active: bool) -> None:
        """Forgets the gathered inputs. Starts or stops sampling training forwards, which makes every step slower."""
        if self.sample is not None:
            self.sample.clear(seed)
            self.sample.active = active
        if self.recent is not None:
            self.recent.clear()

    def close(self) -> None:
        """Removes the hooks from the model."""
        for watcher in (self.sample, self.recent):
            if watcher is not None:
                watcher.close()
