"""The pruner: shrinks a network in the middle of its training."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from rlsprune.graph import Group
from rlsprune.io import modelfile
from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.selector import kept_inputs, strip_inputs
from rlsprune.model.tensors import forget_compiled_code, is_sharded
from rlsprune.prune.criteria import Criterion
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.gate import Decision, Gate
from rlsprune.prune.settings import Settings
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgeon import Surgeon
from rlsprune.prune.surgery import inner


class Pruner:
    """Prunes a network a little whenever its loss has recovered from the last time.

    Call `step` once per epoch with a loss: the epoch's mean training loss, the last minibatch's (the paper to the
    letter), or better a held-out one. The first ``warmup_epochs`` calls never prune; from then on a call prunes if the
    loss is below the least at any prune so far. Parameters stay the same objects, smaller, and the optimizer's state is
    cut with them, so schedulers, parameter groups and hooks stay valid.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        >>> optimizer = rlsprune.RLS(model)
        >>> pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 8), warmup_epochs=0, ratio=0.5)
        >>> inputs = torch.rand(64, 8)
        >>> loss = (model(inputs) - inputs[:, :2]).square().mean()
        >>> loss.backward(); optimizer.step()
        >>> event = pruner.step(loss.item())
        >>> event.params_after < event.params_before
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: ExampleInputs,
        ratio: float | Mapping[str, float] = 0.4,  # ξ
        input_ratio: float | None = None,
        warmup_epochs: int = 30,  # q
        criterion: str | Criterion = "rls",
        compensate: bool = True,
        inverse: str = "schur",
        statistics: str = "exact",
        ignore: Iterable[str] = (),
        min_channels: int = 1,
        round_to: int = 1,
        target: Mapping[str, float] | None = None,
        patience: int | None = 10,
        on_prune: Callable[[PruneEvent], object] | None = None,
        tolerance: float = 0.0,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        """Finds the network's prunable channels and proves on the example that they can go.

        Args:
            model: The network itself, or its DistributedDataParallel wrapper, which is then rebuilt at each prune.
                Every rank makes the same pruner and calls it alike.
            optimizer: Any ``torch.optim`` optimizer of its parameters (not LBFGS).
            example_inputs: What the network is called with: a tensor, a tuple of arguments or a dict of them.
            ratio: ξ in (0, 1), the share of a layer's channels considered at each event; or a mapping from layer names
                (``"input"`` for the input features) to ratios, where layers not named are left alone.
            input_ratio: The same for flat input features; None for ξ/2. Image channels are never pruned.
            warmup_epochs: q, the calls of `step` that never prune.
            criterion: ``"rls"``, ``"obs"``, ``"l1"``, ``"rls-paper"`` (as ``"rls"``, but a channel goes if any of its
                nodes behind a flatten is chosen), or a callable from a `rlsprune.Group` to score vectors, low
                goes first.
            compensate: Refit the layers that read what goes.
            inverse: What happens to the optimizer's P of layers that lose inputs: ``"schur"`` (it becomes that of the
                inputs that stay), ``"slice"`` (it loses their rows and columns, as in the paper) or ``"reset"`` (it
                starts again at p0·I, so that the layer learns as fast as at first).
            statistics: Which P scores and refits: ``"exact"`` (of the inputs themselves, sampled while training) or
                ``"training"`` (the optimizer's own, RLS only).
            ignore: Names of layers that keep all their channels.
            min_channels: What every layer keeps at least.
            round_to: Layers keep a multiple of this many channels, where they lose any.
            target: Stop at this fraction of the original: ``{"params": 0.1}``, ``{"flops": 0.25}`` or
                ``{"latency": 0.5}``. The last event removes no more than it takes to get there.
            patience: Epochs without recovery until the last prune is rolled back and pruning ends; None for never.
            on_prune: Called with the event after each prune and each roll-back.
            tolerance: How much above the least loss at any prune so far counts as recovered, as a share of it.
            evaluate: Gives the loss of the model as it is on held-out data. With it an event takes its channels where
                they cost the loss least: it saves what ``ratio`` of every layer would, parameters and FLOPs counted
                alike, but how much each layer loses is found by cutting it on trial. Called once, and up to three times
                for each layer, at every event and preview, with the model in evaluation mode and without gradients.
        """
        check_argument("warmup_epochs", warmup_epochs, warmup_epochs >= 0, "at least 0")
        check_argument("tolerance", tolerance, 0 <= tolerance < math.inf, "at least 0")
        check_argument("patience", patience, patience is None or patience >= 1, "None or at least 1")
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer, self.example_inputs = optimizer, example_inputs
        _check_trained(self.model, optimizer)
        settings = Settings(
            optimizer,
            ratio,
            input_ratio,
            criterion,
            compensate,
            inverse,
            statistics,
            min_channels,
            round_to,
            dict(target) if isinstance(target, Mapping) else target or {},
        )
        self._surgeon = Surgeon(model, optimizer, example_inputs, settings, ignore)
        self._on_prune = on_prune
        self._gate = Gate(warmup_epochs, patience, tolerance)
        self._recovered: list[Snapshot] | None = None
        """Of the model and its copies, when the loss had last recovered."""
        self.evaluate = evaluate
        """Gives the held-out loss that events are spread by, or None; it may be set at any time."""
        self.done = False
        """Whether pruning has ended: the target is reached, patience ran out, or `finish` was called."""
        self.history: list[PruneEvent] = []
        """Every event so far, roll-backs included."""

    # --- what a training loop calls -----------------------------------------------------------------------------------

    def step(self, loss: float | Tensor) -> PruneEvent | None:
        """Once per epoch: prunes if the loss has recovered. Returns the event if it did.

        Args:
            loss: The loss to compare with those at earlier prunes; which one is up to the caller. Of several ranks,
                each gives that of its share, and the mean counts.
        """
        loss = self._surgeon.mean(float(loss.detach() if isinstance(loss, Tensor) else loss))
        if not math.isfinite(loss):
            raise ValueError(f"loss={loss} in epoch {self._gate.epoch + 1}: training has diverged. Nothing was pruned")
        decision = self._gate.step(loss)
        event = None
        if not self.done and decision is Decision.ROLL_BACK:
            self._roll_back(loss)
        elif not self.done and decision is Decision.PRUNE:
            self.done = self._surgeon.reached()
            if not self.done:
                event = self._prune(loss)
        self._restart_statistics()
        return event

    def prune(self) -> PruneEvent | None:
        """Prunes now, whatever the loss. Returns the event, or None (with a warning) if nothing was chosen.

        Between the first call of `step` and the end of the warm-up no exact statistics are gathered: `calibrate` first.
        """
        return self._prune(None)

    def preview(self) -> PruneEvent | None:
        """The event that `prune` would make, with what that needs, changing nothing; ``print`` shows it as a table."""
        return self._surgeon.prune(self._gate.epoch, None, self.evaluate, preview=True)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Gathers exact input statistics from given batches, when no training step has been seen yet.

        Args:
            batches: Inputs as the model takes them, or (inputs, targets) pairs as a data loader gives them.
        """
        self._surgeon.inverses.calibrate(batches, self.example_inputs)

    def finish(self) -> None:
        """Ends pruning. If the network has not recovered from the last prune, it goes back to the last one that had."""
        if not self._gate.recovered and self._recovered is not None:
            self._roll_back(None)
        self.done = True
        self._restart_statistics()

    def follow(self, copy: nn.Module) -> None:
        """Keeps a copy of the model (a moving average of it, say) in the same shape from now on.

        Raises:
            ValueError: It is no copy of the model, or would average the indices of the input features that are kept, as
                if they were numbers.
            RuntimeError: The model has been pruned, and could be rolled back to a shape that this copy never had.
        """
        if self._recovered is not None:
            raise RuntimeError(
                "follow() comes too late: a roll-back of the last prune could not give this copy its shape. Call it "
                "before the first prune, or before load_state_dict"
            )
        shapes, others = (
            {name: tuple(p.shape) for name, p in network.named_parameters()} for network in (self.model, inner(copy))
        )
        if shapes != others:
            name = next(name for name in {**shapes, **others} if shapes.get(name) != others.get(name))
            raise ValueError(
                f"follow() takes a copy of the model, and {name!r} has the shape {others.get(name)} in this one, "
                f"{shapes.get(name)} in the model"
            )
        if isinstance(copy, AveragedModel) and copy.use_buffers and self._surgeon.prunes_inputs():
            raise ValueError(
                "AveragedModel(use_buffers=True) averages buffers that hold indices, such as those of the kept inputs: "
                "make it with use_buffers=False, which copies buffers, or prune with input_ratio=0"
            )
        self._surgeon.copies.append(copy)

    @property
    def recovered(self) -> bool:
        """Whether the loss has been below the gate since the last prune."""
        return self._gate.recovered

    @property
    def target_reached(self) -> bool:
        """Whether the network is as small as ``target`` asks for; never without one."""
        return self._surgeon.budget.reached()

    def close(self) -> None:
        """Removes the pruner's hooks from the model, which stays as it is. Nothing can be pruned after that."""
        self.done = True
        self._surgeon.inverses.close()

    # --- the result ---------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The channels that can be pruned, as they are now."""
        return self._surgeon.graph.groups

    @property
    def gate_level(self) -> float:
        """What the loss has to get below for the next prune; ∞ before the first."""
        return self._gate.level

    @property
    def skipped(self) -> dict[str, str]:
        """What is left alone, and why."""
        return self._surgeon.graph.skipped

    @property
    def kept_inputs(self) -> Tensor | dict[str, Tensor | None] | None:
        """Indices of the original input features that the network still uses; None if it uses them all.

        By name, if the network has several inputs whose features can be pruned.
        """
        kept = {group.name: kept_inputs(group.consumers[0].module) for group in self.groups if group.is_input}
        return kept if len(kept) > 1 else next(iter(kept.values()), None)

    def strip_inputs(self) -> nn.Module:
        """A copy of the model that takes only the kept input features."""
        return strip_inputs(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as `rlsprune.save` does, with the history in the metadata."""
        modelfile.save(self.model, path, metadata={"history": [event.to_dict() for event in self.history]})

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model and the optimizer, as plain containers and tensors."""
        return {
            "gate": self._gate.state_dict(),
            "done": self.done,
            "history": [event.to_dict() for event in self.history],
            "original": dict(self._surgeon.budget.original),
            "recovered": None if self._recovered is None else [kept.state_dict() for kept in self._recovered],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another pruner stopped: load the model first, then the optimizer, then the pruner."""
        history = [PruneEvent.from_dict(event) for event in state["history"]]
        recovered = None
        if state["recovered"] is not None:
            recovered = self._surgeon.snapshots()
            if len(recovered) != len(state["recovered"]):
                raise ValueError(
                    f"the saved pruner followed {len(state['recovered']) - 1} copies of the model, this one follows "
                    f"{len(self._surgeon.copies)}: call follow() for the same copies before loading"
                )
            for snapshot, saved in zip(recovered, state["recovered"], strict=True):
                snapshot.load_state_dict(saved)
        self._gate.load_state_dict(state["gate"])
        self.done, self.history, self._recovered = bool(state["done"]), history, recovered
        self._surgeon.budget.original |= state["original"]
        self._restart_statistics()

    # --- one event ----------------------------------------------------------------------------------------------------

    def _prune(self, loss: float | None) -> PruneEvent | None:
        kept = self._surgeon.snapshots() if self._gate.patience is not None and loss is not None else None
        event = self._surgeon.prune(self._gate.epoch, loss, self.evaluate)
        if loss is not None:
            self._gate.pruned(loss, changed=event is not None)
        if event is None:
            warnings.warn(
                f"nothing was pruned in epoch {self._gate.epoch}: no channel of any layer may go at ratio="
                f"{self._surgeon.settings.ratio}. Raise ratio, lower min_channels or round_to, or choose another "
                "criterion",
                stacklevel=3,
            )
            return None
        if loss is not None:
            self._recovered = kept
        self._announce(event)
        return event

    def _roll_back(self, loss: float | None) -> None:
        self.done = True
        if self._recovered is None:
            return
        event = self._surgeon.roll_back(self._recovered, self._gate.epoch, loss)
        self._gate.recovered = True
        self._announce(event)

    def _announce(self, event: PruneEvent) -> None:
        forget_compiled_code()
        self._restart_statistics()  # the rows sampled so far are of other layers
        self.history.append(event)
        if self._on_prune is not None:
            self._on_prune(event)

    def _restart_statistics(self) -> None:
        """For the next epoch, if it may end with a prune; before the first call of `step` any moment may."""
        epoch, inverses = self._gate.epoch, self._surgeon.inverses
        inverses.restart(epoch, active=not self.done and (epoch == 0 or epoch >= self._gate.warmup_epochs))


def _check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError unless the optimizer trains the model as a whole."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "the model is divided by fully_shard, and its parts cannot be cut: train it with "
            "DistributedDataParallel, or prune a whole copy (rlsprune.save its full "
            "state, load it into a plain model, prune, and call fully_shard on that)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: it could not recover. Unfreeze it first")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters: give the one that trains this model")
