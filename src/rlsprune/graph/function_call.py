"""One call of a function of torch, and what is known of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsprune.graph.fields import Labelled, compact
from rlsprune.graph.slots import Slots

__all__ = ["FunctionCall", "UnknownFunctionError"]


class UnknownFunctionError(Exception):
    """No rule says what the function does to channels."""


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a function of torch."""

    name: str
    """Name without overload, and without the underscore of functions that work in place."""
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    """Arguments by their names in the function's schema, including defaults."""
    results: list[Tensor]
    where: str
    """The module that makes the call."""
    slots: Slots
    labels_of: Callable[[Any], Labelled]
    is_lone: Callable[[Tensor], bool]
    """Whether a field numbers entries of a parameter that belongs to no layer of a known kind."""
    filters: Callable[[Any], tuple[Tensor, Tensor] | None]
    """The channels that a convolution with this weight reads and makes; None for a weight of no known layer."""
    norm: Tensor | None
    """The channels of the normalisation that makes the call, if it is one."""
    obstacle: Callable[[], str | None]
    """Reason why the layer that makes the call cannot be cut, if it is one of a known kind."""

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the first result."""
        return self.results[0].shape

    def keep(self, fields: Iterable[Tensor], why: str) -> None:
        """Marks the channels of these fields, which have to stay."""
        for labels in fields:
            self.slots.keep(compact(labels), f"{self.where} {why}")
