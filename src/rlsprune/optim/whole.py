"""P whole: the paper's form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.model.tensors import complement, sub_matrix
from rlsprune.optim import functional
from rlsprune.optim.forms import InverseState, Look, Matrices
from rlsprune.optim.packing import pack

# ``xᵀPx`` of n inputs is rounded by about √n roundings of ``xᵀx`` times P's largest entry. What is kept of P in the
# direction of x, in these.
_LEAST = 2


class Whole:
    """P itself."""

    def __init__(self, entry: InverseState) -> None:
        self.P: Tensor = entry["P"]
        self.like = self.P

    def reset_(self, p0: float) -> None:
        """See :class:`Form`."""
        self.P.zero_().diagonal(dim1=-2, dim2=-1).fill_(p0)

    def dense(self) -> Tensor:
        """See :class:`Form`."""
        return self.P

    def eigenvalues(self) -> Tensor:
        """See :class:`Form`."""
        P = self.P.detach().to(device="cpu", dtype=torch.float64)
        return torch.linalg.eigvalsh(P) if P.isfinite().all() else torch.full(P.shape[:-1], torch.nan)

    def asymmetry(self) -> float:
        """See :class:`Form`."""
        return (self.P - self.P.mT).abs().max().item()

    def of_groups(self, keep: Tensor) -> InverseState:
        """See :class:`Form`."""
        return {"P": self.P[keep]}

    def sliced(self, gone: Tensor) -> InverseState:
        """See :class:`Form`."""
        pairs = zip(self.P, gone.to(self.P.device), strict=True)
        return whole_entry([sub_matrix(P, complement(len(P), rows)) for P, rows in pairs])

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """See :class:`Form`."""
        return {"P": functional.initial_inverse(self.P.new_empty(groups, inputs), p0)}


class WholeStep:
    """P of layers of one size in a step."""

    def __init__(self, entries: Sequence[InverseState]) -> None:
        self.P = pack(entries, "P")

    def look(self, means: Sequence[Tensor], mean_scale: float) -> Look:
        """See :class:`InverseStep`."""
        (x,) = means
        self._x, self._mean_scale = x, mean_scale
        self._u, excitation = functional.gain(self.P, x)
        # A spoilt P shows in the excitation; the energy tells of the input alone then.
        largest = self.P.diagonal(dim1=-2, dim2=-1).amax(-1).nan_to_num(nan=1.0, posinf=1.0)
        energy = mean_scale * torch.linalg.vecdot(x, x) * largest
        self._excitation = mean_scale * excitation
        self._floor = _LEAST * self.P.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps * energy
        rounded = self._excitation >= -4 * self._floor
        found = torch.where(rounded, self._excitation.maximum(self._floor), self._excitation)
        return Look(found, energy)

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """See :class:`InverseStep`."""
        (self._gradient,) = gradients
        return functional.norm(*self._gradient)

    def velocity_step_(self, velocities: Sequence[Matrices], momentum: float, scale: Tensor) -> None:
        """See :class:`InverseStep`."""
        (velocity,) = velocities
        functional.velocity_step_(velocity, self._gradient, self.P, momentum, scale)

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """See :class:`InverseStep`.

        Where rounding has left nothing of P in the direction of x, it gets back what it can have: else the errors of
        thousands of steps with large inputs add up until P is indefinite.
        """
        k, x = self._mean_scale, self._x
        square = torch.linalg.vecdot(x, x)
        missing = (self._floor - self._excitation) / k
        down = self._u * (k / (forgetting + self._excitation)).sqrt().unsqueeze(-1)
        up = x * (missing.sqrt() / square).unsqueeze(-1)
        worn = (missing > 0).unsqueeze(-1)
        v, sign = torch.where(worn, up, down), torch.where(worn, -1.0, 1.0).to(x.dtype)
        before = None
        if gate is not None:
            v = torch.where(gate, v, 0)
            before = self.P.clone() if forgetting != 1 else None
        functional.subtract_square_(self.P, v, sign)
        if forgetting != 1:
            functional.forget_(self.P, forgetting, limit)
        if gate is not None and before is not None:
            self.P.copy_(torch.where(gate, self.P, before))


def whole_entry(matrices: Sequence[Tensor]) -> InverseState:
    """P whole, one matrix per group; not copied if there is one."""
    return {"P": matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))}
