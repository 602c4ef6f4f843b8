"""P in factors, as a step and a prune use it; its mathematics is :mod:`rlsprune.optim.factors`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsprune.model.tensors import complement
from rlsprune.optim import factors, functional
from rlsprune.optim.forms import InverseState, Look, Matrices
from rlsprune.optim.packing import joined


class Factored:
    """``P⁻¹ = β(I + CᵀC)``."""

    def __init__(self, entry: InverseState) -> None:
        """Takes what is kept of one layer.

        Args:
            entry: ``C``, ``(G, capacity, n)``, whose rows that are not in use are zero; ``T``, which is ``L⁻¹`` for
                ``LLᵀ = I + CCᵀ``; ``beta``; ``rows``, how many rows of C are in use, and ``rank``, how many of them are
                left when it is full.
        """
        self._entry = entry
        self.C: Tensor = entry["C"]
        self.T: Tensor = entry["T"]
        self.beta: Tensor = entry["beta"]
        self.rows: int = entry["rows"]
        self.rank: int = entry["rank"]

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

    def reset_(self, p0: float) -> None:
        """See :class:`Form`."""
        self.C.zero_()
        self.T.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.beta.fill_(1 / p0)
        self._entry["rows"] = self.rows = 0

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
        return self._with(self.C[keep], self.beta[keep])

    def without(self, gone: Tensor) -> InverseState:
        """A new entry, for the inputs that stay: exactly their P, which is the columns of C that stay."""
        C = self._columns_without(gone)
        return self._with(C, self.beta.clone())

    def sliced(self, gone: Tensor) -> InverseState:
        """See :class:`Form`; the columns that stay, whitened by those that go."""
        T = factors.whitener(factors.gram(_columns(self.C, gone.to(self.C.device))))
        C = (T @ self._columns_without(gone).to(T.dtype)).to(self.C.dtype)
        return self._with(C, self.beta.clone())

    def _columns_without(self, gone: Tensor) -> Tensor:
        stay = torch.stack([complement(self.C.shape[-1], rows) for rows in gone.to(self.C.device)])
        return _columns(self.C, stay)

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """See :class:`Form`."""
        C, T, beta = factors.initial_factors(self.C.new_empty(groups, inputs), p0, self.C.shape[1])
        return {"C": C, "T": T, "beta": beta, "rows": 0, "rank": self.rank}

    def _with(self, C: Tensor, beta: Tensor) -> InverseState:
        return {"C": C, "T": factors.whitener(factors.gram(C)), "beta": beta, "rows": self.rows, "rank": self.rank}


class FactoredStep:
    """P of layers in a step: C for each size, all else for all of them at once."""

    def __init__(self, C: Sequence[Tensor], T: Tensor, beta: Tensor, entries: Sequence[InverseState]) -> None:
        """Takes the tensors of all layers, joined.

        Args:
            C: For each size, ``(G, capacity, n)``.
            T: Of all groups, in the same order.
            beta: Too.
            entries: Of all layers, which have equally many rows in use.
        """
        self.C, self.T, self.beta, self._entries = C, T, beta, entries
        self.rows, self.rank = entries[0]["rows"], entries[0]["rank"]

    def _sizes(self, tensor: Tensor) -> Sequence[Tensor]:
        """The part of each size in a tensor with all groups."""
        return [tensor] if len(self.C) == 1 else torch.split(tensor, [len(C) for C in self.C])

    def _meet_rows(self, new: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``TCc``, ``cᵀc`` and the excitation of a new row for each group."""
        T = self.T[:, : self.rows, : self.rows]
        columns = [row.to(T.dtype).unsqueeze(-1) for row in new]
        products = [C[:, : self.rows].to(T.dtype) @ c for C, c in zip(self.C, columns, strict=True)]
        energy = joined([c.mT @ c for c in columns])
        known, excitation = factors.excitation(T, joined(products), energy)
        return known, energy.view(-1), excitation

    def look(self, means: Sequence[Tensor], mean_scale: float) -> Look:
        """See :class:`InverseStep`."""
        self._p = self.beta.reciprocal()
        # As they will be stored: what T says of a row that was rounded since adds up until P is indefinite.
        self._new = self._scaled(means, (self._p * mean_scale).sqrt())
        self._known, energy, self._excitation = self._meet_rows(self._new)
        return Look(self._excitation, energy)

    def _scaled(self, rows: Sequence[Tensor], by: Tensor) -> list[Tensor]:
        by = by.to(self.C[0].dtype).unsqueeze(-1)
        return [row * own for row, own in zip(rows, self._sizes(by), strict=True)]

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """See :class:`InverseStep`; a gradient that is not finite shows in the thin product."""
        T = self._sizes(self.T[:, : self.rows, : self.rows].to(self.C[0].dtype))
        self._Z = [own @ C[:, : self.rows] for own, C in zip(T, self.C, strict=True)]
        self._thin = [factors.thin_product(Z, *own) for Z, own in zip(self._Z, gradients, strict=True)]
        if not self.rows:
            return joined([functional.norm(*own) for own in gradients])
        return joined([thin.sum((1, 2)) for thin in self._thin])

    def velocity_step_(
        self, velocities: Sequence[Matrices], gradients: Sequence[Matrices], momentum: float, scale: Tensor
    ) -> None:
        """See :class:`InverseStep`."""
        scales = self._sizes((scale * self._p).to(self.C[0].dtype).view(-1, 1, 1))
        for own in zip(velocities, gradients, self._Z, self._thin, scales, strict=True):
            (Psi, psi), (gradient, bias_gradient), Z, thin, s = own
            factors.velocity_step_(Psi, psi, gradient, bias_gradient, Z, thin, momentum=momentum, scale=s)

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """See :class:`InverseStep`; a full C is compressed even where the gate is closed, and gets a row of zeros."""
        new, known, excitation = self._new, self._known, self._excitation
        if gate is not None:
            new = [torch.where(gate, row, 0) for row in new]
            known, excitation = (torch.where(gate, value, 0) for value in (known, excitation))
        full = self.rows == self.C[0].shape[1]
        if full:
            self._compress()
        if forgetting != 1:
            self._forget(forgetting, limit, gate)
        if full or forgetting != 1:
            new = self._scaled(new, (self._p * self.beta).rsqrt())
            known, _, excitation = self._meet_rows(new)
        for C, row in zip(self.C, new, strict=True):
            C[:, self.rows] = row
        self._set_rows(self.rows + 1)
        factors.append_(self.T[:, : self.rows, : self.rows], known, excitation)

    def _forget(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        beta, left = factors.forget(self.beta, forgetting, limit)
        if gate is not None:
            beta, left = torch.where(gate, beta, self.beta), torch.where(gate, left, 1)
        self.beta.copy_(beta)
        for C, share in zip(self.C, self._sizes(left.sqrt().to(self.C[0].dtype)), strict=True):
            C.mul_(share[:, None, None])
        self._whiten()

    def _compress(self) -> None:
        inputs = joined([self.beta.new_full((len(C), 1), C.shape[-1]) for C in self.C])
        turns, growth = factors.compress(joined([factors.gram(C) for C in self.C]), inputs, self.rank)
        for C, turn in zip(self.C, self._sizes(turns), strict=True):
            strongest = turn @ C.to(turn.dtype)
            C.zero_()[:, : self.rank] = strongest
        self.beta.mul_(growth)
        self._whiten()
        self._set_rows(self.rank)

    def _whiten(self) -> None:
        self.T.copy_(factors.whitener(joined([factors.gram(C) for C in self.C])))

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        for entry in self._entries:
            entry["rows"] = rows


def _columns(C: Tensor, which: Tensor) -> Tensor:
    """Selects each group's own columns, ``(G, m, k)``."""
    return C.gather(-1, which.unsqueeze(-2).expand(-1, C.shape[-2], -1))
