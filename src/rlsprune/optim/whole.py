"""P whole: the paper's form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.model.tensors import complement, sub_matrix
from rlsprune.optim import functional
from rlsprune.optim.functional import Matrices
from rlsprune.optim.packing import InverseState, pack

# ``xᵀPx`` of n inputs is rounded by about √n roundings of ``xᵀx`` times P's largest entry. P keeps at least this many
# times that rounding in the direction of x.
_LEAST = 2


class Whole:
    """P of a layer, ``(G, n, n)``, as a prune and a check use it."""

    def __init__(self, entry: InverseState) -> None:
        self.P: Tensor = entry["P"]
        self.like = self.P
        """Tensor with P's dtype, device, groups and inputs; `eigenvalues` decomposes matrices of as many rows."""

    def dense(self) -> Tensor:
        """Returns P itself, ``(G, n, n)``."""
        return self.P

    def eigenvalues(self) -> Tensor:
        """Computes the eigenvalues of P, ``(G, n)``, in float64 on the CPU; NaN if P is not finite."""
        P = self.P.detach().to(device="cpu", dtype=torch.float64)
        return torch.linalg.eigvalsh(P) if P.isfinite().all() else torch.full(P.shape[:-1], torch.nan)

    def asymmetry(self) -> float:
        """Returns the largest absolute difference between P and its transpose."""
        return (self.P - self.P.mT).abs().max().item()

    def sliced(self, gone: Tensor) -> InverseState:
        """Returns a new entry with the block of P of the inputs that stay when those of ``gone``, ``(G, m)``, go."""
        pairs = zip(self.P, gone.to(self.P.device), strict=True)
        return whole_entry([sub_matrix(P, complement(len(P), rows)) for P, rows in pairs])


class WholeStep:
    """P of layers of one size in a step, taken as one layer with the groups of all of them."""

    def __init__(self, entries: Sequence[InverseState]) -> None:
        self.P = pack(entries, "P")

    def look(self, means: Sequence[Tensor], mean_scale: float) -> tuple[Tensor, Tensor]:
        """Computes Eqs. (17) and (18).

        Args:
            means: Mean inputs of each size, ``(G, n)``.
            mean_scale: k, which `update_` uses again.

        Returns:
            For each group ``k·xᵀPx``, NaN or negative if P is not positive definite; and ``k·xᵀx`` times about the
            largest eigenvalue of P, the scale of the former's rounding errors.
        """
        (x,) = means
        self._x, self._mean_scale = x, mean_scale
        self._u, excitation = functional.gain(self.P, x)
        # A P that is not finite shows in the excitation; the energy then tells of the input alone.
        largest = self.P.diagonal(dim1=-2, dim2=-1).amax(-1).nan_to_num(nan=1.0, posinf=1.0)
        energy = mean_scale * torch.linalg.vecdot(x, x) * largest
        self._excitation = mean_scale * excitation
        self._floor = _LEAST * self.P.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps * energy
        rounded = self._excitation >= -4 * self._floor
        return torch.where(rounded, self._excitation.maximum(self._floor), self._excitation), energy

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """Keeps the gradients for `velocity_step_`. Returns one number per group, finite if they are."""
        (self._gradient,) = gradients
        return functional.norm(*self._gradient)

    def velocity_step_(self, velocities: Sequence[Matrices], momentum: float, scale: Tensor) -> None:
        """Computes Eq. (21) in place, ``Ψ ← α·Ψ − s·P∇``, with s per group."""
        (velocity,) = velocities
        functional.velocity_step_(velocity, self._gradient, self.P, momentum, scale)

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """Computes Eq. (16) in place.

        Where rounding has left nothing of P in the direction of x, P is raised there to the rounding error: otherwise
        the errors of thousands of steps with large inputs add up until P is indefinite.

        Args:
            forgetting: λ.
            limit: Bound of P, with λ < 1, in a direction that is never excited.
            gate: None, or a 0-dim bool on the device: where it is False, P stays as it was.
        """
        k, x = self._mean_scale, self._x
        square = torch.linalg.vecdot(x, x)
        missing = (self._floor - self._excitation) / k
        down = self._u * (k / (forgetting + self._excitation)).sqrt().unsqueeze(-1)
        up = x * (missing.sqrt() / square).unsqueeze(-1)
        worn = (missing > 0).unsqueeze(-1)
        v, sign = torch.where(worn, up, down), torch.where(worn, -1.0, 1.0).to(x.dtype)
        functional.subtract_square_(self.P, v if gate is None else torch.where(gate, v, 0), sign)
        if forgetting != 1:
            functional.forget_(self.P, forgetting, limit, gate)


def whole_entry(matrices: Sequence[Tensor]) -> InverseState:
    """Returns the entry of a whole P, one matrix per group; a single matrix is not copied."""
    return {"P": matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))}
