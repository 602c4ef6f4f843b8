"""The state of pruning: the part of a pruner that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlsprune.model.arguments import quoted
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.gate import Gate
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import LiveNetwork


@dataclass
class PruningState:
    """The gate, the events so far, and the network to roll back to.

    A pruner changes a copy of its state, and puts the copy in place once the event has happened.
    """

    gate: Gate
    first_inputs: Mapping[str, list[int]]
    """Name of a group that had lost input features before the first event → the features that were left."""
    history: list[PruneEvent] = field(default_factory=list)
    """Every event so far, roll-backs included."""
    recovered: list[Snapshot] | None = None
    """The model and its copies when the loss had last recovered."""
    done: bool = False

    def copy(self) -> PruningState:
        """Returns the same state with a gate of its own; the list of events is shared."""
        return replace(self, gate=replace(self.gate))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain containers and tensors."""
        return {
            "gate": self.gate.state_dict(),
            "done": self.done,
            "history": [event.to_dict() for event in self.history],
            "first_inputs": dict(self.first_inputs),
            "recovered": None if self.recovered is None else [kept.state_dict() for kept in self.recovered],
        }

    def loaded(self, state: Mapping[str, Any], network: LiveNetwork) -> PruningState:
        """Returns the saved state, with the settings of this one, which does not change.

        Args:
            state: The result of `Pruner.state_dict`.
            network: The network that the state belongs to, already loaded.

        Raises:
            ValueError: The state is not that of a pruner, or belongs to another network or other copies of it.
        """
        keys = ("gate", "done", "history", "original", "recovered")
        missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
        if missing:
            raise ValueError(f"the state of the pruner lacks {quoted(missing)}: give what Pruner.state_dict() returned")
        history = [PruneEvent.from_dict(event) for event in state["history"]]
        _check_sizes(history, network)
        loaded = replace(
            self.copy(),
            first_inputs={**state.get("first_inputs", {})},  # 0.1.0 did not save it
            history=history,
            recovered=_snapshots(state["recovered"], network),
            done=bool(state["done"]),
        )
        loaded.gate.load_state_dict(state["gate"])
        return loaded


def _check_sizes(history: list[PruneEvent], network: LiveNetwork) -> None:
    """Raises ValueError unless the network is that of the last event."""
    present = network.sizes()
    for name, _, size in history[-1].layers if history else ():
        # An attention with one head left can lose none, so it is not among the groups any more.
        if present.get(name, 1 if name.endswith("]") else None) != size:
            raise ValueError(
                f"the saved pruner's network has {size} channels in {name!r} after its last event, this one has "
                f"{present.get(name)}: load the model of the same checkpoint before its pruner"
            )


def _snapshots(states: list[dict[str, Any]] | None, network: LiveNetwork) -> list[Snapshot] | None:
    if states is None:
        return None
    snapshots = network.snapshots()
    if len(snapshots) != len(states):
        raise ValueError(
            f"the saved pruner followed {len(states) - 1} copies of the model, this one follows "
            f"{len(network.copies)}: call follow() for the same copies before loading"
        )
    for snapshot, saved in zip(snapshots, states, strict=True):
        snapshot.load_state_dict(saved)
    return snapshots
