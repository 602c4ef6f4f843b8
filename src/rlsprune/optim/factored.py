"""P in factors, as a step and a prune use it; its mathematics is :mod:`rlsprune.optim.factors`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.model.tensors import complement
from rlsprune.optim import factors, functional
from rlsprune.optim.forms import InverseState, Look, Matrices


class Factored:
    """``P⁻¹ = β(I + CᵀC)``."""

    def __init__(
        self, C: Tensor, T: Tensor, beta: Tensor, rows: int, rank: int, entries: Sequence[InverseState]
    ) -> None:
        """Takes the tensors.

        Args:
            C: ``(G, capacity, n)``; rows that are not in use are zero.
            T: ``L⁻¹`` for ``LLᵀ = I + CCᵀ``.
            beta: β.
            rows: How many rows of C are in use.
            rank: How many are left when it is full.
            entries: Whose number of rows changes with an update.
        """
        self.C, self.T, self.beta, self.rows, self.rank, self._entries = C, T, beta, rows, rank, entries

    @property
    def like(self) -> Tensor:
        """See :class:`Form`."""
        return self.C

    @property
    def cost(self) -> int:
        """See :class:`Form`."""
        return self.C.shape[-2]

    def _used(self) -> tuple[Tensor, Tensor]:
        return self.C[:, : self.rows], self.T[:, : self.rows, : self.rows]

    def look(self, x: Tensor, mean_scale: float) -> Look:
        """See :class:`Form`."""
        C, T = self._C, self._T = self._used()
        self._p = self.beta.reciprocal()
        # As it will be stored: what T says of a row that was rounded since adds up until P is indefinite.
        self._row = (x * (self._p * mean_scale).sqrt().unsqueeze(-1)).to(C.dtype)
        self._known, energy, self._excitation = factors.excitation(C, T, self._row)
        return Look(self._excitation, energy)

    def meet(self, gradients: Matrices) -> Tensor:
        """See :class:`Form`; a gradient that is not finite shows in the thin product."""
        self._Z = self._T.to(self._C.dtype) @ self._C
        self._thin = factors.thin_product(self._Z, *gradients)
        return self._thin.sum((1, 2)) if self.rows else functional.norm(*gradients)

    def velocity_step_(self, velocities: Matrices, gradients: Matrices, momentum: float, scale: Tensor) -> None:
        """See :class:`Form`."""
        scale = (scale * self._p).to(self.C.dtype).view(-1, 1, 1)
        factors.velocity_step_(*velocities, *gradients, self._Z, self._thin, momentum=momentum, scale=scale)

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """See :class:`Form`; a full C is compressed even where the gate is closed, and gets a row of zeros there."""
        row, known, excitation = self._row, self._known, self._excitation
        if gate is not None:
            row, known, excitation = (torch.where(gate, value, 0) for value in (row, known, excitation))
        full = self.rows == self.C.shape[1]
        if full:
            self._compress()
        if forgetting != 1:
            self._forget(forgetting, limit, gate)
        if full or forgetting != 1:
            row = (row * (self._p * self.beta).rsqrt().unsqueeze(-1)).to(row.dtype)
            known, _, excitation = factors.excitation(*self._used(), row)
        self.C[:, self.rows] = row
        self._set_rows(self.rows + 1)
        factors.append_(self.T[:, : self.rows, : self.rows], known, excitation)

    def _forget(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        beta, left = factors.forget(self.beta, forgetting, limit)
        if gate is not None:
            beta, left = torch.where(gate, beta, self.beta), torch.where(gate, left, 1)
        self.beta.copy_(beta)
        self.C.mul_(left.sqrt().to(self.C.dtype)[:, None, None])
        self.T.copy_(factors.whitener(self.C))

    def _compress(self) -> None:
        strongest, _, beta = factors.compress(self.C, self.beta, self.rank)
        self.C.zero_()[:, : self.rank] = strongest
        self.T.copy_(factors.whitener(self.C))
        self.beta.copy_(beta)
        self._set_rows(self.rank)

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        for entry in self._entries:
            entry["rows"] = rows

    def reset_(self, p0: float) -> None:
        """See :class:`Form`."""
        self.C.zero_()
        self.T.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.beta.fill_(1 / p0)
        self._set_rows(0)

    def dense(self) -> Tensor:
        """See :class:`Form`."""
        C, T = self._used()
        Z = T @ C.to(T.dtype)
        identity = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device)
        return ((identity - Z.mT @ Z) / self.beta[:, None, None]).to(self.C.dtype)

    def eigenvalues(self) -> Tensor:
        """See :class:`Form`; those of CCᵀ give them."""
        C, n = self.C[:, : self.rows].detach().to(device="cpu", dtype=torch.float64), self.C.shape[-1]
        beta = self.beta.to(device="cpu", dtype=torch.float64).unsqueeze(-1)
        energies = torch.full((len(C), n), 0.0 if C.isfinite().all() else torch.nan, dtype=torch.float64)
        if C.isfinite().all():
            strongest = torch.linalg.eigvalsh(C @ C.mT).flip(-1)[:, :n]
            energies[:, : strongest.shape[-1]] = strongest.clamp_min(0)
        return 1 / (beta * (1 + energies))

    def asymmetry(self) -> float:
        """See :class:`Form`."""
        return 0.0

    def of_groups(self, keep: Tensor) -> InverseState:
        """See :class:`Form`."""
        return self._entry(self.C[keep], self.T[keep], self.beta[keep])

    def without(self, gone: Tensor) -> InverseState:
        """A new entry, for the inputs that stay: exactly their P, which is the columns of C that stay."""
        C = self._columns_without(gone)
        return self._entry(C, factors.whitener(C), self.beta.clone())

    def sliced(self, gone: Tensor) -> InverseState:
        """See :class:`Form`; the columns that stay, whitened by those that go."""
        T = factors.whitener(_columns(self.C, gone.to(self.C.device)))
        C = (T @ self._columns_without(gone).to(T.dtype)).to(self.C.dtype)
        return self._entry(C, factors.whitener(C), self.beta.clone())

    def _columns_without(self, gone: Tensor) -> Tensor:
        stay = torch.stack([complement(self.C.shape[-1], rows) for rows in gone.to(self.C.device)])
        return _columns(self.C, stay)

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """See :class:`Form`."""
        C, T, beta = factors.initial_factors(self.C.new_empty(groups, inputs), p0, self.C.shape[1])
        return {"C": C, "T": T, "beta": beta, "rows": 0, "rank": self.rank}

    def _entry(self, C: Tensor, T: Tensor, beta: Tensor) -> InverseState:
        return {"C": C, "T": T, "beta": beta, "rows": self.rows, "rank": self.rank}


def _columns(C: Tensor, which: Tensor) -> Tensor:
    """Selects each group's own columns, ``(G, m, k)``."""
    return C.gather(-1, which.unsqueeze(-2).expand(-1, C.shape[-2], -1))
