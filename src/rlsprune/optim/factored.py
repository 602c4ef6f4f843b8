"""P in factors, as a step and a prune use it; its mathematics is in `rlsprune.optim.factors`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlsprune.model.tensors import complement
from rlsprune.optim import factors, functional
from rlsprune.optim.functional import Matrices
from rlsprune.optim.packing import InverseState, joined, pack


def capacity(rank: int) -> int:
    """Returns the number of rows that C has room for: 1.5·rank, so that it is compressed once in rank/2 steps."""
    return rank + -(-rank // 2)


def initial_factors(x: Tensor, p0: float, rank: int) -> InverseState:
    """Returns the entry of ``P = p0·I`` for a layer with this mean input ``(G, n)``.

    Returns:
        ``C``, ``(G, capacity, n)``, whose rows that are not in use are zero; ``T``, which is ``L⁻¹`` for
        ``LLᵀ = I + CCᵀ``; ``beta``; ``rows``, the number of rows of C in use; and ``rank``, the number of rows left
        when a full C is compressed.
    """
    (groups, n), room = x.shape, capacity(rank)
    T = torch.eye(room, dtype=factors.wide(x.device), device=x.device).repeat(groups, 1, 1)
    return {"C": x.new_zeros(groups, room, n), "T": T, "beta": T.new_full((groups,), 1 / p0), "rows": 0, "rank": rank}


class Factored:
    """P in factors, ``P⁻¹ = β(I + CᵀC)``, as a prune and a check use it; see `rlsprune.optim.whole.Whole`."""

    def __init__(self, entry: InverseState) -> None:
        self._entry = entry
        self.C: Tensor = entry["C"]
        self.beta: Tensor = entry["beta"]
        self.rows: int = entry["rows"]
        self.like = self.C

    def dense(self) -> Tensor:
        """Computes P, ``(I − ZᵀZ)/β``."""
        T: Tensor = self._entry["T"][:, : self.rows, : self.rows]
        Z = T @ self.C[:, : self.rows].to(T.dtype)
        identity = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device)
        return ((identity - Z.mT @ Z) / self.beta[:, None, None]).to(self.C.dtype)

    def eigenvalues(self) -> Tensor:
        """Computes the eigenvalues of P from those of CCᵀ."""
        C, n = self.C[:, : self.rows].detach().to(device="cpu", dtype=torch.float64), self.C.shape[-1]
        beta = self.beta.to(device="cpu", dtype=torch.float64).unsqueeze(-1)
        if not C.isfinite().all():
            return torch.full((len(C), n), torch.nan, dtype=torch.float64)
        energies = torch.linalg.eigvalsh(C @ C.mT).clamp_min(0).flip(-1)[:, :n]
        return 1 / (beta * (1 + nn.functional.pad(energies, (0, n - energies.shape[-1]))))

    def asymmetry(self) -> float:
        """Returns 0: P in factors is always symmetric."""
        return 0.0

    def without(self, gone: Tensor) -> InverseState:
        """Returns a new entry with the columns of C of the inputs that stay, which is exactly the P of these inputs."""
        return self._with(self._columns(gone)[0])

    def sliced(self, gone: Tensor) -> InverseState:
        """Returns a new entry with the columns of C that stay, whitened by those that go."""
        staying, going = self._columns(gone)
        T = factors.whitener(factors.gram(going))
        return self._with((T @ staying.to(T.dtype)).to(staying.dtype))

    def _columns(self, gone: Tensor) -> list[Tensor]:
        """Returns each group's own columns of C: those that stay, and those that go."""
        gone = gone.to(self.C.device)
        stay = torch.stack([complement(self.C.shape[-1], rows) for rows in gone])
        return [self.C.gather(-1, own.unsqueeze(-2).expand(-1, self.C.shape[-2], -1)) for own in (stay, gone)]

    def _with(self, C: Tensor) -> InverseState:
        return self._entry | {"C": C, "T": factors.whitener(factors.gram(C)), "beta": self.beta.clone()}


class FactoredStep:
    """P of layers in a step, as in `rlsprune.optim.whole.WholeStep`: C by size, all else for all layers at once."""

    def __init__(self, sizes: Sequence[Sequence[InverseState]]) -> None:
        """Takes the entries of the layers of each size, all of which have equally many rows in use."""
        self._entries = [entry for same in sizes for entry in same]
        self._C = [pack(same, "C") for same in sizes]
        self._T, self._beta = pack(self._entries, "T"), pack(self._entries, "beta")
        self._rows: int = self._entries[0]["rows"]

    def _used(self) -> tuple[list[Tensor], Tensor]:
        """Returns C and T without the rows that are not in use."""
        return [C[:, : self._rows] for C in self._C], self._T[:, : self._rows, : self._rows]

    def _by_size(self, tensor: Tensor) -> Sequence[Tensor]:
        """Splits a tensor with all groups into the part of each size."""
        return [tensor] if len(self._C) == 1 else torch.split(tensor, [len(C) for C in self._C])

    def _scaled(self, rows: Sequence[Tensor], by: Tensor) -> list[Tensor]:
        parts = self._by_size(by.to(self._C[0].dtype).unsqueeze(-1))
        return [row * own for row, own in zip(rows, parts, strict=True)]

    def _meet_rows(self) -> Tensor:
        """Computes how the new row of each group relates to the present ones; returns ``cᵀc``."""
        used, T = self._used()
        columns = [row.to(T.dtype).unsqueeze(-1) for row in self._new]
        products = joined([C.to(T.dtype).bmm(c) for C, c in zip(used, columns, strict=True)])
        energy = joined([c.mT.bmm(c) for c in columns])
        self._known, self._excitation = factors.excitation(T, products, energy)
        return energy.view(-1)

    def look(self, means: Sequence[Tensor], mean_scale: float) -> tuple[Tensor, Tensor]:
        """Computes Eq. (18) from ``xᵀPx = (xᵀx − |TCx|²)/β``."""
        self._p = self._beta.reciprocal()
        # Rounded as they will be stored: errors of T about rows that are rounded later add up until P is indefinite.
        self._new = self._scaled(means, (self._p * mean_scale).sqrt())
        energy = self._meet_rows()
        return self._excitation, energy

    def meet(self, gradients: Sequence[Matrices]) -> Tensor:
        """Computes the thin products, in which a gradient that is not finite shows."""
        used, T = self._used()
        Z = [own.bmm(C) for own, C in zip(self._by_size(T.to(used[0].dtype)), used, strict=True)]
        thin = [factors.thin_product(*own) for own in zip(Z, gradients, strict=True)]
        self._met = list(zip(gradients, Z, thin, strict=True))
        return joined([own.sum((1, 2)) for own in thin] if self._rows else [functional.norm(*own) for own in gradients])

    def velocity_step_(self, velocities: Sequence[Matrices], momentum: float, scale: Tensor) -> None:
        """Computes ``Ψ ← α·Ψ − s/β·(∇ − (∇Zᵀ)Z)``."""
        scales = self._by_size((scale * self._p).to(self._C[0].dtype).view(-1, 1, 1))
        for velocity, met, own in zip(velocities, self._met, scales, strict=True):
            factors.velocity_step_(velocity, *met, momentum, own)

    def update_(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """Computes Eq. (16) in place. Where the gate is closed, a full C is compressed too, and gets a row of zeros."""
        if gate is not None:
            self._new = [torch.where(gate, row, 0) for row in self._new]
            self._known, self._excitation = (torch.where(gate, v, 0) for v in (self._known, self._excitation))
        full = self._rows == self._C[0].shape[1]
        if full:
            self._compress()
        if forgetting != 1:
            self._forget(forgetting, limit, gate)
        if full or forgetting != 1:
            self._T.copy_(factors.whitener(joined([factors.gram(C) for C in self._C])))
            self._new = self._scaled(self._new, (self._p * self._beta).rsqrt())
            self._meet_rows()
        for C, row in zip(self._C, self._new, strict=True):
            C[:, self._rows] = row
        self._rows += 1
        for entry in self._entries:
            entry["rows"] = self._rows
        factors.append_(self._used()[1], self._known, self._excitation)

    def _forget(self, forgetting: float, limit: float, gate: Tensor | None) -> None:
        beta, left = factors.forget(self._beta, forgetting, limit)
        if gate is not None:
            beta, left = torch.where(gate, beta, self._beta), torch.where(gate, left, 1)
        self._beta.copy_(beta)
        for C, share in zip(self._C, self._by_size(left.sqrt().to(self._C[0].dtype)), strict=True):
            C.mul_(share[:, None, None])

    def _compress(self) -> None:
        rank = self._rows = self._entries[0]["rank"]
        inputs = joined([self._beta.new_full((len(C), 1), C.shape[-1]) for C in self._C])
        turns, growth = factors.compress(joined([factors.gram(C) for C in self._C]), inputs, rank)
        for C, turn in zip(self._C, self._by_size(turns), strict=True):
            strongest = turn.bmm(C.to(turn.dtype))
            C.zero_()[:, :rank] = strongest
        self._beta.mul_(growth)
