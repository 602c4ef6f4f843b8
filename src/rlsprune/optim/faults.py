"""Numerical faults of a step: found before anything is changed, and reported without making an accelerator wait."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlsprune.model.tensors import host_waits

Fault = tuple[float, str]
"""Place in the network, and description of the fault."""
Check = tuple[Callable[[], list[Fault]], Tensor]
"""Function that lists the possible faults, called only if a check fails, and one flag for each on the device."""

_MOST_UNDER_WAY = 16  # steps that the host may be ahead of an accelerator before it waits


class FaultWatch:
    """Looks at a step's checks: at once on the CPU; on an accelerator the step is masked and the report comes later."""

    def __init__(self, on_fault: str) -> None:
        self.on_fault = on_fault
        self._looks: deque[_Look] = deque()

    def gates(self, checks: Sequence[Check]) -> dict[torch.device, Tensor | None] | None:
        """Returns the gate of a step for each device: None for an open gate, or a 0-dim bool on the device.

        Args:
            checks: Checks of this step.

        Returns:
            None if the step must not be taken.

        Raises:
            FloatingPointError: A check failed, with ``on_fault="raise"``.
        """
        gates: dict[torch.device, Tensor | None] = dict.fromkeys(flags.device for _, flags in checks)
        waits = [device for device in gates if host_waits(device)]
        for device in gates:
            flags = torch.cat([flags.to(device, non_blocking=True) for _, flags in checks])
            if not waits:
                return None if self._tell(_Look(checks, flags).failed(), stacklevel=6) else gates
            gates[device] = flags.all()
            if device == waits[0]:
                self._looks.append(_Look(checks, flags))
        return gates

    def report(self, wait: bool = False) -> None:
        """Raises or warns if a check of an earlier step failed.

        Args:
            wait: Whether to wait for results that are still under way on an accelerator.
        """
        while self._looks and (wait or len(self._looks) > _MOST_UNDER_WAY or self._looks[0].arrived):
            self._tell(self._looks.popleft().failed(), stacklevel=4 if wait else 5)

    def __getstate__(self) -> dict[str, object]:
        return {"on_fault": self.on_fault, "_looks": deque()}  # what is under way on a device stays there

    def _tell(self, failed: list[str], stacklevel: int) -> bool:
        if not failed:
            return False
        message = (
            f"{failed[0]}{f' (and {len(failed) - 1} more)' if len(failed) > 1 else ''}. Weights and P are "
            "as before that step. Check the data and the loss, or lower lr; optimizer.check() tells the health "
            "of P and optimizer.reset() renews it. Large inputs wear P out in float32: scale them, or give RLS "
            "dtype=torch.float64"
        )
        if self.on_fault == "raise":
            self._looks.clear()
            raise FloatingPointError(message)
        warnings.warn(f"step skipped, {message}", stacklevel=stacklevel)
        return True


class _Look:
    """The checks of one step, perhaps on their way from an accelerator to the host."""

    def __init__(self, checks: Sequence[Check], flags: Tensor) -> None:
        self._faults, self._flags = [faults for faults, _ in checks], flags
        self._event: torch.Event | None = None
        if flags.device.type in ("cuda", "xpu"):
            # Other devices do not tell when a copy has arrived: the next step reads the flags and waits for them.
            self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True).copy_(flags, non_blocking=True)
            self._event = torch.Event(flags.device)
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether the flags can be read without waiting, as far as that can be told."""
        return self._event is None or bool(self._event.query())

    def failed(self) -> list[str]:
        """Returns the faults in the order of the network, so that a cause comes before its consequences."""
        if self._event is not None:
            self._event.synchronize()
        if self._flags.all():
            return []
        told = [fault for faults in self._faults for fault in faults()]
        failed = [fault for fault, ok in zip(told, self._flags.tolist(), strict=True) if not ok]
        return [what for _, what in sorted(failed, key=lambda fault: fault[0])]
