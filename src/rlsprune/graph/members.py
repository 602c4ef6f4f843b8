"""One side of one layer, as a part of a group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rlsprune.graph.layers import Side

__all__ = ["Axis", "Member"]

Axis = tuple[str, Side]


@dataclass(frozen=True)
class Member:
    """One side of one layer, with the channels that belong to each unit of the group."""

    name: str
    """The name of the module in ``model.named_modules()``, or of a parameter that stands by itself."""
    module: nn.Module
    """The layer; for a parameter that stands by itself, the module that owns it."""
    side: Side
    index: Tensor
    """(units × k): the channels on that side that belong to each unit, ascending."""
    dim: int | None = None
    """Dimension along which the channels of a parameter that stands by itself lie; None for a layer."""
    reads: nn.Module | None = None
    """The module whose output the layer is called with, where that is known."""

    @property
    def axis(self) -> Axis:
        """Returns what the index counts along: members of different groups can share it, as after a concatenation."""
        return self.name, self.side
