"""The random numbers that a network draws while it trains, such as dropout's, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlsprune.app.run.share import Share

__all__ = ["RandomStates"]


class RandomStates:
    """The states of torch's own generators: the CPU's, and that of the device if it is another.

    All ranks draw images with the same generator. The numbers that a network draws must differ between ranks, as their
    images do.

    Args:
        share: The ranks, whose states are kept together.
        device: The network's device.
        seed: The run's seed.
    """

    def __init__(self, share: Share, device: torch.device, seed: int) -> None:
        self._share, self._seed = share, seed
        self._device = None if device.type == "cpu" else torch.get_device_module(device)

    def draw_apart(self, epoch: int) -> None:
        """Reseeds every rank except the first, so that ranks draw different numbers from this epoch on."""
        ranks = self._share.ranks
        if ranks is not None and ranks.rank > 0:
            torch.manual_seed(self._seed + 1_000_003 * (epoch * ranks.size + ranks.rank))

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks; every rank must call it."""
        device = None if self._device is None else self._share.of_each(self._device.get_rng_state().cpu())
        return {"random": self._share.of_each(torch.get_rng_state()), "device_random": device}

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restores this rank's own states; a new rank or another device draws new numbers."""
        self.draw_apart(epoch)
        kinds = [("random", torch)] if self._device is None else [("random", torch), ("device_random", self._device)]
        for name, generator in kinds:
            saved = state.get(name)
            own = self._share.own_of([saved] if isinstance(saved, Tensor) else saved or ())  # 0.1.0 saved only rank 0's
            if own is not None:
                generator.set_rng_state(own)
