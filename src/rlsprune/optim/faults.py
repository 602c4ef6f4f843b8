"""Numerical faults of a step: found before anything is changed, and reported without making an accelerator wait."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rlsprune.optim.functional import host_waits


class FaultWatch:
    """Looks at a step's checks: at once on the CPU; on an accelerator the step is masked and the report comes later."""

    def __init__(self, on_fault: str) -> None:
        self.on_fault = on_fault
        self._checks: list[tuple[str, Tensor]] = []

    def gates(self, checks: list[tuple[str, Tensor]]) -> dict[torch.device, Tensor | None] | None:
        """What lets a step through, for each device: None for an open gate, or a 0-dim bool on the device.

        Args:
            checks: What is checked, and a 0-dim bool that says whether it is finite.

        Returns:
            None if the step must not be taken.

        Raises:
            FloatingPointError: A check failed, with ``on_fault="raise"``.
        """
        self._checks = checks
        gates: dict[torch.device, Tensor | None] = dict.fromkeys(ok.device for _, ok in checks)
        if any(host_waits(device) for device in gates):
            for device in gates:
                gates[device] = torch.stack([ok.to(device, non_blocking=True) for _, ok in checks]).all()
        elif self.report():
            return None
        return gates

    def report(self) -> bool:
        """Raises or warns if a check of the last step failed; True if one did."""
        failed = [what for what, ok in self._checks if not ok]
        self._checks = []
        if not failed:
            return False
        message = (
            f"not finite: {failed[0]}{f' (and {len(failed) - 1} more)' if len(failed) > 1 else ''}. Weights and P are "
            "as before that step. Check the data and the loss, or lower lr; optimizer.check() tells the health "
            "of P and optimizer.reset() renews it"
        )
        if self.on_fault == "raise":
            raise FloatingPointError(message)
        warnings.warn(f"step skipped, {message}", stacklevel=5)
        return True
