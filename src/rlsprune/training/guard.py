"""Numerical faults of a run: they are found in the step where they happen, and raised, skipped or rolled back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rlsprune.model.tensors import all_finite, host_waits

__all__ = ["MAX_ROLLBACKS", "FaultError", "Guard", "rollbacks"]

MAX_ROLLBACKS = 3
"""Largest number of roll-backs in one run; each halves the learning rate."""
MAX_SKIPS = 10
"""Largest number of batches skipped in a row."""

# Training has diverged if the loss is so many times the mean of the first steps, or so many times 1 if that is more.
# No training that still works comes near this bound. In the epoch after a prune a lower bound shows damage sooner.
_DIVERGED, _DIVERGED_AFTER_PRUNE = 100.0, 10.0
_FIRST_STEPS = 10
# Reading a value makes an accelerator's host wait, so there it is done every so many batches and at an epoch's end.
_LOOK_EVERY = 100


def rollbacks(faults: Iterable[Mapping[str, Any]]) -> int:
    """Returns how many of the faults were rolled back."""
    return sum(fault["action"] == "rolled back" for fault in faults)


class FaultError(FloatingPointError):
    """A number that is not finite, or a loss that has diverged, with its place and the remedy."""

    def __init__(self, what: str, where: str, remedy: str = "look at the data, or lower the learning rate") -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what, self.where, self.remedy = what, where, remedy

    def __reduce__(self) -> tuple[type[FaultError], tuple[str, str, str]]:
        # By default an exception is rebuilt from its message alone, so it would not survive a worker process.
        return type(self), (self.what, self.where, self.remedy)


class Guard:
    """Checks the steps of a run for numerical faults.

    Args:
        model: The network.
        on_fault: "raise"; "skip" the batch, with a warning and at most ten in a row; or "rollback", which raises too,
            for the run to go back to its last checkpoint.
        alone: Whether this process trains alone. If one of several skipped a batch, it would wait for the others
            forever; so only the losses of epochs are checked then, not batches, and a fault ends the run.

    Raises:
        ValueError: Skipping or roll-backs are asked for with several processes.
    """

    def __init__(self, model: nn.Module, on_fault: str = "raise", alone: bool = True) -> None:
        if not alone and on_fault != "raise":
            raise ValueError(f"--on-fault {on_fault} is for a run in one process: leave it out, or run one")
        self._model, self._on_fault, self._alone = model, on_fault, alone
        self._epoch, self._batch, self._skips = 0, 0, 0
        self.after_prune = False
        """Whether the last epoch ended with a prune."""
        self._first: list[float] = []
        self.faults: list[dict[str, Any]] = []
        """Every fault so far, and what was done about it."""

    def start_epoch(self, epoch: int, after_prune: bool) -> None:
        """Begins an epoch, and notes whether the previous one ended with a prune."""
        self._epoch, self._batch, self.after_prune = epoch, 0, after_prune

    def inputs(self, inputs: object) -> bool:
        """Whether a batch is finite. Call it before the network sees the batch."""
        self._batch += 1
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        fine = all(not self._looks(tensor) or bool(tensor.isfinite().all()) for tensor in tensors)
        return fine or self._fault("the batch holds a NaN or an infinity", "look at the data")

    def loss(self, loss: Tensor) -> bool:
        """Whether the loss of the batch is finite and has not diverged. Call it before the backward pass."""
        if not self._looks(loss):
            return True
        value = float(loss.detach())
        if not math.isfinite(value):
            broken = [name for name, tensor in self._model.named_parameters() if not bool(tensor.isfinite().all())]
            cause = f", and so are weights of {broken[0]!r}" if broken else ""
            return self._fault(f"the loss is {value}{cause}")
        limit = self._limit()
        if value > limit:
            when = " after the prune" if self.after_prune else ""
            return self._fault(f"the loss has risen to {value:.3g}{when}, above {limit:.3g}: the training has diverged")
        if len(self._first) < _FIRST_STEPS:
            self._first.append(value)
        return True

    def step(self, optimizer: Optimizer) -> bool:
        """Takes the optimizer's step if the gradients are finite. Returns whether it was taken."""
        try:
            if not hasattr(optimizer, "report_faults"):  # RLS checks its own gradients
                self._check_gradients()
            optimizer.step()
        except FaultError:
            raise
        except FloatingPointError as error:  # nothing has changed then
            return self._fault(str(error), "lower the learning rate")
        self._skips = 0
        return True

    def last_step(self, optimizer: Optimizer) -> None:
        """Reports the faults of the epoch's last steps, which an accelerator reports late."""
        report = getattr(optimizer, "report_faults", None)
        if report is not None:
            try:
                report()
            except FloatingPointError as error:
                self._fault(str(error), "lower the learning rate")

    def epoch_loss(self, what: str, value: float) -> None:
        """Checks a loss over many batches, which cannot be skipped.

        Raises:
            FaultError: The loss is not finite.
        """
        if not math.isfinite(value):
            raise FaultError(f"the {what} loss is {value}", f"end of epoch {self._epoch}")

    def noted(self, error: FloatingPointError) -> list[dict[str, Any]]:
        """Adds the fault that ended the epoch, and returns all faults so far."""
        action = "rolled back" if self._on_fault == "rollback" else "stopped"
        self.faults.append({"epoch": self._epoch, "batch": self._batch, "what": str(error), "action": action})
        return self.faults

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the rest of the run depends on."""
        return {"faults": self.faults, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""
        self.faults, self._first = list(state["faults"]), [float(value) for value in state["first"]]

    def _looks(self, tensor: Tensor) -> bool:
        return self._alone and (not host_waits(tensor.device) or self._batch % _LOOK_EVERY == 0)

    def _limit(self) -> float:
        times = _DIVERGED_AFTER_PRUNE if self.after_prune else _DIVERGED
        return times * max(1.0, sum(self._first) / len(self._first)) if self._first else math.inf

    def _check_gradients(self) -> None:
        gradients = {
            name: p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for name, p in self._model.named_parameters()
            if p.grad is not None
        }
        if (
            not gradients
            or not self._looks(next(iter(gradients.values())))
            or bool(all_finite([*gradients.values()]).all())
        ):
            return
        broken = next(name for name, gradient in gradients.items() if not bool(all_finite([gradient]).all()))
        raise FloatingPointError(f"the gradient of {broken!r} is not finite")

    def _fault(self, what: str, remedy: str = "look at the data, or lower the learning rate") -> bool:
        """Skips the batch with a warning and returns False, or raises."""
        where = f"epoch {self._epoch}, batch {self._batch}"
        self._skips += 1
        skipped = self._on_fault == "skip" and self._skips <= MAX_SKIPS
        if not skipped:
            raise FaultError(what, where, remedy)
        self.faults.append({"epoch": self._epoch, "batch": self._batch, "what": what, "action": "skipped"})
        warnings.warn(f"{where}: {what}; the batch was skipped", stacklevel=5)
        return False
