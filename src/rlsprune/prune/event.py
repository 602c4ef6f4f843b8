"""The record of one pruning event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["prune", "roll-back", "preview"]
Refit = Literal["whole", "layers"]


class LayerChange(NamedTuple):
    """Sizes before and after: a layer's output channels, an attention's heads, or the network's input features."""

    name: str
    before: int
    after: int


class Measures(NamedTuple):
    """The costs of a network and the sizes of its layers at one moment."""

    params: int
    flops: int
    sizes: Mapping[str, int]
    """Name of a layer → its output channels; also the numbers of input features, heads and dimensions inside them."""


@dataclass(frozen=True)
class PruneEvent:
    """One event: the removed channels, and the network's cost before and after. ``print(event)`` shows a table.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 4), ratio=0.25, criterion="l1", compensate=False)
        >>> event = pruner.prune()
        >>> event.kind, event.params_before, event.params_after
        ('prune', 49, 37)
        >>> {change.name: (change.before, change.after) for change in event.layers}["0"]
        (8, 6)
        >>> PruneEvent.from_dict(event.to_dict()) == event  # through JSON, say
        True
    """

    epoch: int
    """Number of calls of ``pruner.step`` up to the event."""
    loss: float | None
    """The loss that opened the gate; None for an event by hand."""
    params_before: int
    params_after: int
    flops_before: int
    flops_after: int
    layers: tuple[LayerChange, ...]
    removed: dict[str, list[int]] = field(default_factory=dict)
    """Name of a group (its first layer, or ``input``) → its units that went, numbered as before the event."""
    kind: Kind = "prune"
    refit: Refit | None = None
    """``"whole"``: the smaller network was refitted to the outputs of the one before. ``"layers"``: each layer that
    lost inputs was refitted to its own outputs. None: nothing was refitted."""

    @classmethod
    def between(
        cls,
        before: Measures,
        after: Measures,
        epoch: int,
        loss: float | None,
        kind: Kind,
        removed: dict[str, list[int]],
        refit: Refit | None = None,
    ) -> PruneEvent:
        """Returns the event that turned one network into another."""
        return cls(
            epoch=epoch,
            loss=loss,
            params_before=before.params,
            params_after=after.params,
            flops_before=before.flops,
            flops_after=after.flops,
            layers=tuple(LayerChange(name, size, after.sizes[name]) for name, size in before.sizes.items()),
            removed=removed,
            kind=kind,
            refit=refit,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the event as plain containers, for JSON and checkpoints."""
        return asdict(self) | {"layers": [list(change) for change in self.layers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PruneEvent:
        """Returns the event that `to_dict` has turned into plain containers."""
        return cls(**{**values, "layers": tuple(LayerChange(*change) for change in values["layers"])})

    def __str__(self) -> str:
        title = {"prune": "pruned", "roll-back": "rolled back", "preview": "would be pruned"}[self.kind]
        refit = {"whole": ", refitted as a whole", "layers": ", refitted layer by layer", None: ""}[self.refit]
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        rows = [(change.name or "model", change.before, change.after) for change in self.layers]
        rows += [("parameters", self.params_before, self.params_after), ("FLOPs", self.flops_before, self.flops_after)]
        wide = [max(len(f"{row[i]:,}" if i else str(row[0])) for row in rows) for i in range(3)]
        lines = [
            f"epoch {self.epoch}: {title}{refit}{loss}",
            f"{'layer':<{wide[0]}}  {'before':>{wide[1]}}  {'after':>{wide[2]}}",
        ]
        for name, before, after in rows:
            share = f"{100 * after / before:5.1f} %" if before else ""
            lines.append(f"{name:<{wide[0]}}  {before:>{max(wide[1], 6)},}  {after:>{max(wide[2], 5)},}  {share}")
        return "\n".join(lines)
