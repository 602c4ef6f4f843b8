"""What a step and a prune ask of P, whichever form the optimizer keeps it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

InverseState = dict[str, Any]
"""What is kept of one layer's P: :mod:`rlsprune.optim.entries`."""
Matrices = tuple[Tensor, Tensor | None]
"""What belongs to the weight, ``(G, out, n)``, and to the bias, ``(G, out)``, if there is one."""


class Look(NamedTuple):
    """What P says of a mean input, one value per group."""

    excitation: Tensor
    """``k·xᵀPx``; NaN or negative if P is not positive definite."""
    energy: Tensor
    """``k·xᵀx`` times about the largest eigenvalue of P: what rounding errors of the excitation are relative to."""


class InverseStep(Protocol):
    """P of several layers in one step; layers of equal size are one layer with the groups of all of them."""

    def look(self, means: Sequence[Tensor], mean_scale: float) -> Look:
        """Eqs. (17), (18), with the mean inputs for each size, ``(G, n)``, and k, which :meth:`update_` uses again."""

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """One number per group, finite if the gradients are, which :meth:`velocity_step_` uses."""

    def velocity_step_(self, velocities: Sequence[Matrices], momentum: float, scale: Tensor) -> None:
        """Eq. (21) in place, ``Ψ ← α·Ψ − s·P∇``, with s per group."""

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """Eq. (16) in place.

        Args:
            forgetting: λ.
            limit: With λ < 1 a direction that is never excited grows no further.
            gate: None, or a 0-dim bool on the device: where it is False, P stays as it was.
        """


class Form(Protocol):
    """P of a layer, ``(G, n, n)``, in one of its forms."""

    like: Tensor
    """P, or with it in factors C: has its dtype, device, groups and inputs, and the rows of the largest matrix that
    eigenvalues take."""

    def reset_(self, p0: float) -> None:
        """``P ← p0·I`` in place."""

    def dense(self) -> Tensor:
        """P itself, ``(G, n, n)``."""

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of P, ``(G, n)``, in float64 on the CPU; NaN if P is not finite."""

    def asymmetry(self) -> float:
        """Largest absolute difference between P and its transpose."""

    def of_groups(self, keep: Tensor) -> InverseState:
        """A new entry, for some of the groups."""

    def sliced(self, gone: Tensor) -> InverseState:
        """A new entry, for the inputs that stay when those go, ``(G, m)``: their block of P."""

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """A new entry of the same form with ``P = p0·I``."""
