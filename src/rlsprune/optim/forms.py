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
        """Eqs. (17), (18). Remembers what :meth:`update_` needs.

        Args:
            means: The mean inputs for each size, ``(G, n)``.
            mean_scale: k.
        """

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """Remembers what of P∇ :meth:`velocity_step_` can use; one number per group, finite if the gradients are."""

    def velocity_step_(
        self, velocities: Sequence[Matrices], gradients: Sequence[Matrices], momentum: float, scale: Tensor
    ) -> None:
        """Eq. (21) in place, ``Ψ ← α·Ψ − s·P∇``, for the gradients that :meth:`meet` got and s per group."""

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """Eq. (16) in place with the mean inputs and the k that :meth:`look` got.

        Args:
            forgetting: λ.
            limit: With λ < 1 a direction that is never excited grows no further.
            gate: None, or a 0-dim bool on the device: where it is False, P stays as it was.
        """


class Form(Protocol):
    """P of a layer, ``(G, n, n)``, in one of its forms."""

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of P, as many groups and inputs."""

    @property
    def cost(self) -> int:
        """The size of the matrices that measuring P's health takes."""

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
        """A new entry, for the inputs that stay: their block of P.

        Args:
            gone: The inputs that go, ``(G, m)``.
        """

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """A new entry of the same form with ``P = p0·I``."""
