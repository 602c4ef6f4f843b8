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

from rlsprune.graph import Group
from rlsprune.io import modelfile
from rlsprune.model.arguments import check_callable, one_number, readable_state
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.interrupts import uninterrupted
from rlsprune.model.selector import strip_inputs
from rlsprune.model.tensors import forget_compiled_code
from rlsprune.optim.rls import RLS
from rlsprune.prune.checks import check_copy, check_kinds, check_trained
from rlsprune.prune.criteria import Criterion
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.gate import Decision, Gate
from rlsprune.prune.operation import HeldOutLoss, Operation
from rlsprune.prune.ranking import inputs_left, ranked_inputs
from rlsprune.prune.settings import AS_IN_PAPER, Settings
from rlsprune.prune.state import PruningState
from rlsprune.prune.surgery import LiveNetwork


class Pruner:
    """Prunes a network a little whenever its loss has recovered from the last prune.

    Call `step` once per epoch with a loss: the epoch's mean training loss, the last minibatch's (as in the
    paper), or better a held-out one. The first ``warmup_epochs`` calls never prune; after that a call prunes if the
    loss is back at the lowest loss at any prune so far. Parameters stay the same objects and get smaller, and the
    optimizer's state is cut with them, so schedulers, parameter groups and hooks stay valid.

    An event happens completely or not at all: an error or Ctrl-C in the middle of it leaves network, optimizer, gate
    and history unchanged. ``on_prune`` is called when the event is in the history; an error in it undoes
    nothing.

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
        *,
        ratio: float | Mapping[str, float] = 0.2,  # ξ
        input_ratio: float | None = None,
        warmup_epochs: int = 3,  # q
        criterion: str | Criterion = "obs",
        compensate: bool = True,
        inverse: str = "schur",
        statistics: str = "exact",
        ignore: Iterable[str] = (),
        min_channels: int = 1,
        round_to: int | None = None,
        target: Mapping[str, float] | None = None,
        tolerance: float = 0.05,
        patience: int | None = 10,
        on_prune: Callable[[PruneEvent], object] | None = None,
        held_out_loss: HeldOutLoss | None = None,
    ) -> None:
        """Finds the network's prunable channels and checks on the example that they can go.

        Args:
            model: The network itself, or its DistributedDataParallel wrapper, which is then rebuilt at each prune.
                Every rank makes the same pruner and makes the same calls.
            optimizer: The ``torch.optim`` optimizer of its parameters; any but LBFGS.
            example_inputs: Inputs of the network: a tensor, a tuple of arguments or a dict of them.
            ratio: ξ in (0, 1), the share of a layer's channels considered at each event; or a mapping from layer names
                (``"input"`` for the input features) to ratios, which prunes only the named layers. In a network with
                batch norms an event saves as much in total, but removes channels where that costs least.
            input_ratio: The same for flat input features; None for ξ/2. Image channels are never pruned.
            warmup_epochs: q, the calls of `step` that never prune.
            criterion: ``"obs"`` (least error after the refit), ``"rls"`` (the paper's scores), ``"rls-paper"`` (the
                same, but a channel goes if any of its nodes behind a flatten is chosen), ``"l1"``, or a callable that
                takes a `rlsprune.Group` and returns score vectors (low scores go first).
            compensate: Whether to refit the layers that read removed channels, or in a network with batch norms all
                layers behind them, to the network before the event.
            inverse: Treatment of the optimizer's P of layers that lose inputs: ``"schur"`` (it becomes that of the
                remaining inputs), ``"slice"`` (it loses their rows and columns, as in the paper) or ``"reset"`` (it
                starts again at p0·I, so that the layer learns as fast as at first).
            statistics: The P that scores and refits use: ``"exact"`` (P of the inputs themselves, sampled while
                training) or ``"training"`` (the optimizer's own, RLS only, layer by layer in every network).
            ignore: Names of layers that keep all their channels.
            min_channels: Least number of channels that every layer keeps.
            round_to: Layers that lose channels keep a multiple of this many. None: 1, or with a target of latency the
                multiple that is measured to cost no time, and less where that lets nothing go.
            target: Pruning stops at this fraction of the original: ``{"params": 0.1}``, ``{"flops": 0.25}`` or
                ``{"latency": 0.5}``. The last event removes no more than necessary. ``{"inputs": 5}`` keeps
                five flat input features (a float: that fraction of them) and prunes nothing else; together with one of
                the others, pruning ends when both are reached.
            tolerance: A loss up to this share above the lowest loss at any prune so far counts as recovered.
            patience: Number of epochs without recovery after which the last prune is rolled back and pruning ends;
                None to wait forever.
            on_prune: Called with the event after each prune and each roll-back.
            held_out_loss: A function without arguments that returns the model's loss on held-out data. With it an
                event cuts each layer on trial, and then saves as many parameters and FLOPs as ``ratio`` of every layer
                would, but where that raises this loss least. An event that would raise the loss by more than a quarter
                becomes smaller. Every event and preview calls it up to three times for each layer, and up to seven
                times more, with the model in evaluation mode and without gradients.
        """
        check_kinds(model, optimizer)
        check_callable("on_prune", on_prune)
        check_callable("held_out_loss", held_out_loss)
        gate = Gate(warmup_epochs, patience, tolerance)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer, self.example_inputs = optimizer, example_inputs
        check_trained(self.model, optimizer)
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
            {} if target is None else dict(target) if isinstance(target, Mapping) else target,
        )
        self._on_prune = on_prune
        self.held_out_loss = held_out_loss
        """The function that returns the held-out loss, or None; it may be set at any time."""
        operation = None
        try:
            with uninterrupted():
                self._network = LiveNetwork(model, optimizer, example_inputs, ignore)
                operation = self._operation = Operation(self._network, example_inputs, settings)
                left = inputs_left(self.groups)
                first_inputs = {name: kept.tolist() for name, kept in left.items() if kept is not None}
                self._state = PruningState(gate, first_inputs)
        except BaseException:
            if operation is not None:
                operation.close()
            raise

    @classmethod
    def as_in_paper(
        cls, model: nn.Module, optimizer: Optimizer, example_inputs: ExampleInputs, **changes: Any
    ) -> Pruner:
        """Makes a pruner that follows Algorithm 1 exactly.

        It uses the paper's scores, no compensation and P sliced, and considers 40 % of the channels, after 30 epochs.

        Args:
            model: The network, as for `Pruner`.
            optimizer: An `rlsprune.RLS` with ``rank=None``, whose own P gives the scores.
            example_inputs: Inputs of the network, as for `Pruner`.
            **changes: Settings of `Pruner` that differ from Algorithm 1.

        Raises:
            ValueError: The optimizer is not RLS with P whole.

        Examples:
            >>> import torch, rlsprune
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
            >>> rlsprune.Pruner.as_in_paper(model, rlsprune.RLS(model, rank=None), torch.rand(1, 8), warmup_epochs=5)
            Pruner(2 groups, 354 parameters (100 %), epoch 0, no event yet)
        """
        if not isinstance(optimizer, RLS):
            raise ValueError(
                f"the paper prunes by the P of RLS, not with {type(optimizer).__name__}: use RLS(model, rank=None)"
            )
        if optimizer.rank is not None:
            raise ValueError(
                f"the paper keeps P whole, but the optimizer has rank={optimizer.rank}: use RLS(model, rank=None)"
            )
        return cls(model, optimizer, example_inputs, **{**AS_IN_PAPER, **changes})

    def __repr__(self) -> str:
        params, original = self._operation.measures().params, self._operation.budget.original["params"]
        events = sum(event.kind == "prune" for event in self.history)
        made = f"{events} event{'s' if events > 1 else ''}" if events else "no event yet"
        done = ", done" if self.done else ""
        return (
            f"Pruner({len(self.groups)} groups, {params:,} parameters ({100 * params / original:.3g} %), "
            f"epoch {self._state.gate.epoch}, {made}{done})"
        )

    # --- what a training loop calls -----------------------------------------------------------------------------------

    def step(self, loss: float | Tensor) -> PruneEvent | None:
        """Prunes if the loss has recovered; call it once per epoch. Returns the event, or None.

        Args:
            loss: The loss to compare with those at earlier prunes; the caller chooses which one. On several ranks,
                each passes the loss on its share of the data, and the mean counts.
        """
        loss = self._network.mean(one_number("loss", loss))
        state, event = self._state.copy(), None
        if not math.isfinite(loss):
            epoch = state.gate.epoch + 1
            raise ValueError(
                f"loss={loss} in epoch {epoch}: training has diverged, nothing was pruned. Lower the learning rate"
            )
        decision = state.gate.step(loss)
        with uninterrupted():
            opened = decision is Decision.PRUNE and not self.done
            state.done = self.done or (opened and self._operation.target_reached())
            prunes = opened and not state.done
            if prunes:
                event = self._prune(state, loss)
            elif decision is Decision.ROLL_BACK and not self.done:
                event = self._roll_back(state, loss)
            else:
                self._commit(state)
        if prunes:
            self._warn(event)
        self._tell(event)
        return event if prunes else None

    def prune(self) -> PruneEvent | None:
        """Prunes now, at any loss. Returns the event, or None (with a warning) if no channel may go.

        Between the first call of `step` and the end of the warm-up no exact statistics are gathered: call `calibrate`
        first.
        """
        with uninterrupted():
            event = self._prune(self._state.copy(), None)
        self._warn(event)
        self._tell(event)
        return event

    def preview(self) -> PruneEvent | None:
        """Returns the event that `prune` would make, and changes nothing; ``print`` shows it as a table."""
        with uninterrupted():
            return self._operation.run(self._state.gate.epoch, None, self.held_out_loss, preview=True)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Gathers exact input statistics from given batches, for a pruner that has seen no training step yet.

        Args:
            batches: Inputs as the model takes them, or (inputs, targets) pairs as a data loader gives them.
        """
        self._operation.evidence.calibrate(batches)

    def stop(self) -> None:
        """Ends pruning. Later steps make no events, but still record whether the network has recovered."""
        self._state.done = True
        self._restart_statistics()

    def finish(self) -> PruneEvent | None:
        """Ends pruning, and undoes the last prune if the network has not recovered from it.

        Warns if nothing was ever pruned, and says why.

        Returns:
            The roll-back's event, or None if the network stays as it is.
        """
        with uninterrupted():
            event = None if self._state.gate.recovered else self._roll_back(self._state.copy(), None)
            self.stop()
        if not self.history:
            warnings.warn(f"nothing was ever pruned: {self._why_nothing()}", stacklevel=2)
        self._tell(event)
        return event

    def follow(self, copy: nn.Module) -> None:
        """Cuts a copy of the model, such as a moving average, together with the model from now on.

        Raises:
            ValueError: The module is no copy of the model, or would average the indices of the kept input features as
                if they were values.
            RuntimeError: The model has been pruned, and could be rolled back to a shape that this copy never had.
        """
        if self._state.recovered is not None:
            raise RuntimeError(
                "follow() comes too late: a roll-back of the last prune could not give this copy its shape. Call it "
                "before the first prune, or before load_state_dict"
            )
        check_copy(copy, self.model, loses_inputs=self._operation.prunes_inputs())
        self._network.copies.append(copy)

    @property
    def history(self) -> list[PruneEvent]:
        """Returns every event so far, roll-backs included."""
        return self._state.history

    @property
    def done(self) -> bool:
        """Whether pruning has ended: the target is reached, patience ran out, or `stop` or `finish` was called."""
        return self._state.done

    @property
    def recovered(self) -> bool:
        """Whether the loss has been below the gate since the last prune."""
        return self._state.gate.recovered

    @property
    def target_reached(self) -> bool:
        """Whether the network is as small as ``target`` asks for; False without a target."""
        return self._operation.reached()

    def close(self) -> None:
        """Removes the pruner's hooks from the model, which stays as it is. Nothing can be pruned after that."""
        self._state.done = True
        self._operation.close()

    # --- the result ---------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """Returns the groups of channels that can be pruned, as they are now."""
        return self._network.graph.groups

    @property
    def gate_level(self) -> float:
        """Returns the value that the loss must fall below for the next prune; ∞ before the first."""
        return self._state.gate.level

    @property
    def skipped(self) -> dict[str, str]:
        """Returns the modules that cannot be pruned, with the reasons."""
        return self._network.graph.skipped

    @property
    def kept_inputs(self) -> Tensor | dict[str, Tensor | None] | None:
        """Returns the indices of the original input features that the network still uses; None if it uses them all.

        If several inputs of the network have features that can be pruned, the result is a dict by name.
        """
        left = inputs_left(self.groups)
        return left if len(left) > 1 else next(iter(left.values()), None)

    @property
    def input_ranking(self) -> Tensor | dict[str, Tensor]:
        """Ranks the input features: 1 if the network still uses them, 2 if they were removed last, and so on.

        Features that were removed before the pruner was made come last.

        If several inputs of the network have features that can be pruned, the result is a dict by name.
        """
        ranks = ranked_inputs(self.groups, self._state.first_inputs, self.history)
        return ranks if len(ranks) > 1 else next(iter(ranks.values()))

    def strip_inputs(self) -> nn.Module:
        """Returns a copy of the model that takes only the kept input features."""
        return strip_inputs(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as `rlsprune.save` does, with the history in the metadata."""
        modelfile.save(self.model, path, metadata={"history": [event.to_dict() for event in self.history]})

    def state_dict(self) -> dict[str, Any]:
        """Returns everything but the model and the optimizer, as plain containers and tensors."""
        return self._state.state_dict() | {"original": dict(self._operation.budget.original)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where another pruner stopped. Load the model first, then the optimizer, then the pruner.

        Raises:
            ValueError: The state is not that of a pruner, or belongs to another network or other copies of it. Nothing
                changes then.
        """
        with readable_state("Pruner"), self._network.traced_again():
            loaded, original = self._state.loaded(state, self._network), {**state["original"]}
        with uninterrupted():
            self._operation.budget.original |= original
            self._commit(loaded)

    # --- one event ----------------------------------------------------------------------------------------------------

    def _prune(self, state: PruningState, loss: float | None) -> PruneEvent | None:
        """Makes an event if any channel may go, and commits it with the state after this epoch."""
        kept = self._network.snapshots() if state.gate.patience is not None and loss is not None else None
        event = self._operation.run(state.gate.epoch, loss, self.held_out_loss)
        if loss is not None:
            state.gate.pruned(loss, changed=event is not None)
            state.recovered = state.recovered if event is None else kept
        if event is not None or loss is not None:
            self._commit(state, event)
        return event

    def _roll_back(self, state: PruningState, loss: float | None) -> PruneEvent | None:
        """Undoes the prunes since the network last recovered, if there are any, and ends pruning."""
        event = None
        if state.recovered is not None:
            event = self._operation.roll_back(state.recovered, state.gate.epoch, loss)
            state.gate.recovered = True
        state.done = True
        self._commit(state, event)
        return event

    def _commit(self, state: PruningState, event: PruneEvent | None = None) -> None:
        """Puts a new state in place. Is called while Ctrl-C is held back, so that it happens completely."""
        self._state = state
        if event is not None:
            self.history.append(event)
            forget_compiled_code()
        self._restart_statistics()  # the rows sampled so far belong to the layers before the event

    def _tell(self, event: PruneEvent | None) -> None:
        if event is not None and self._on_prune is not None:
            self._on_prune(event)

    def _warn(self, event: PruneEvent | None) -> None:
        """Warns if there was nothing to prune, or if the event cost more accuracy than necessary."""
        reason = self._operation.not_whole
        if event is None:
            warnings.warn(
                f"nothing was pruned in epoch {self._state.gate.epoch}: no channel of any layer may go at ratio="
                f"{self._operation.settings.ratio}. Raise ratio, lower min_channels or round_to, or choose another "
                "criterion",
                stacklevel=3,
            )
        elif event.refit == "layers" and reason is not None:
            # The same text every time, so that it is shown once.
            warnings.warn(
                "an event was refitted layer by layer, which costs a network with batch norms more accuracy: it could "
                f"not be refitted as a whole ({reason})",
                stacklevel=3,
            )

    def _why_nothing(self) -> str:
        epochs, warmup = self._state.gate.epoch, self._state.gate.warmup_epochs
        if epochs <= warmup:
            return f"only {epochs} epochs were counted, and the first warmup_epochs={warmup} never prune"
        if self.target_reached:
            return "the network was as small as target asks for from the start"
        return f"no channel of any layer may go at ratio={self._operation.settings.ratio}, or pruning was stopped first"

    def _restart_statistics(self) -> None:
        """Gathers statistics for the next epoch if it can end with a prune. Before the first `step` it always can."""
        epoch = self._state.gate.epoch
        self._operation.evidence.restart(
            epoch, active=not self.done and (epoch == 0 or epoch >= self._state.gate.warmup_epochs)
        )
