"""The two forms in which the optimizer keeps P: whole, or in factors. A step and a prune do not care which.

`optimizer.state[weight]["inverse"]` is a dict of plain values: ``{"P"}``, or ``{"C", "M", "beta", "rows", "rank"}``
(:mod:`rlsprune.optim.factors`). A form wraps the values of one layer, or of several equal layers as one with the groups
of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlsprune.model.tensors import complement, sub_matrix
from rlsprune.optim import factors, functional
from rlsprune.optim.packing import INVERSE, pack

InverseState = dict[str, Any]
"""What is kept of one layer's P."""
Matrices = tuple[Tensor, Tensor | None]
"""What belongs to the weight, ``(G, out, n)``, and to the bias, ``(G, out)``, if there is one."""


class Look(NamedTuple):
    """What a form finds before a step, one value per group."""

    excitation: Tensor
    """``xᵀPx``."""
    square: Tensor
    """``xᵀx``."""
    largest: Tensor
    """About the largest eigenvalue of P; times ``xᵀx`` it is what rounding errors of ``xᵀPx`` are relative to."""
    definite: Tensor
    """Whether P is positive definite."""
    finite: Tensor
    """Whether the gradients are finite."""


class Form(Protocol):
    """P of a layer, ``(G, n, n)``, in one of its forms."""

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of P, and as many groups."""

    @property
    def cost(self) -> int:
        """The size of the matrices that measuring P's health takes."""

    def prepare(self, x: Tensor, gradients: Matrices) -> Look:
        """Eqs. (17), (18) for the mean input ``(G, n)``. Remembers what the other two parts of the step need."""

    def velocity_step_(self, velocities: Matrices, gradients: Matrices, momentum: float, scale: Tensor) -> None:
        """Eq. (21) in place, ``Ψ ← α·Ψ − s·P∇``, for the gradients that :meth:`prepare` got and s per group."""

    def update_(self, mean_scale: float, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """Eq. (16) in place with the mean input that :meth:`prepare` got.

        Args:
            mean_scale: k.
            forgetting: λ.
            limit: With λ < 1 a direction that is never excited grows no further.
            gate: None, or a 0-dim bool on the device: where it is False, P stays as it was.
        """

    def reset_(self, p0: float) -> None:
        """``P ← p0·I`` in place."""

    def dense(self) -> Tensor:
        """P itself, ``(G, n, n)``."""

    def eigenvalues(self) -> Tensor:
        """Of P, ``(G, n)``, in float64 on the CPU; NaN if it is not finite."""

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


class Whole:
    """P itself."""

    def __init__(self, P: Tensor) -> None:
        self.P = P

    @property
    def like(self) -> Tensor:
        """See :class:`Form`."""
        return self.P

    @property
    def cost(self) -> int:
        """See :class:`Form`."""
        return self.P.shape[-1]

    def prepare(self, x: Tensor, gradients: Matrices) -> Look:
        """See :class:`Form`."""
        self._u, self._excitation = functional.gain(self.P, x)
        square, largest = torch.linalg.vecdot(x, x), self.P.diagonal(dim1=-2, dim2=-1).amax(-1)
        return Look(self._excitation, square, largest, self._excitation >= 0, functional.all_finite(*gradients))

    def velocity_step_(self, velocities: Matrices, gradients: Matrices, momentum: float, scale: Tensor) -> None:
        """See :class:`Form`."""
        functional.velocity_step_(*velocities, *gradients, self.P, momentum=momentum, scale=scale)

    def update_(self, mean_scale: float, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """See :class:`Form`."""
        u, h = self._u, forgetting + mean_scale * self._excitation
        before = None
        if gate is not None:
            u, h = torch.where(gate, u, 0), torch.where(gate, h, 1)
            before = self.P.clone() if forgetting != 1 else None
        functional.rank_one_downdate_(self.P, u, h, mean_scale=mean_scale, forgetting=forgetting, limit=limit)
        if gate is not None and before is not None:
            self.P.copy_(torch.where(gate, self.P, before))

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


class Factored:
    """``P⁻¹ = β(I + CᵀC)``."""

    def __init__(
        self, C: Tensor, M: Tensor, beta: Tensor, rows: int, rank: int, entries: Sequence[InverseState]
    ) -> None:
        """Takes the tensors.

        Args:
            C: ``(G, capacity, n)``.
            M: ``I + CCᵀ``.
            beta: β.
            rows: How many rows of C are in use.
            rank: How many are left when it is full.
            entries: Whose number of rows changes with an update.
        """
        self.C, self.M, self.beta, self.rows, self.rank, self._entries = C, M, beta, rows, rank, entries

    @property
    def like(self) -> Tensor:
        """See :class:`Form`."""
        return self.C

    @property
    def cost(self) -> int:
        """See :class:`Form`."""
        return self.C.shape[-2]

    def prepare(self, x: Tensor, gradients: Matrices) -> Look:
        """See :class:`Form`; a gradient that is not finite shows in the thin product."""
        rows, C, M = self.rows, self.C[:, : self.rows], self.M[:, : self.rows, : self.rows]
        self._x, self._p = x.to(M.dtype), self.beta.reciprocal()
        self._square, self._Cx = torch.linalg.vecdot(self._x, self._x), factors.products(C, self._x)
        whitener, sound = factors.whitening(M)
        # What is left of xᵀx when C has nearly all of it is mostly rounding, but never less than this.
        least = self._square * self._p / (1 + M.diagonal(dim1=-2, dim2=-1).sum(-1) - rows)
        excitation = factors.excitation(whitener, self._Cx, self._square, self._p).maximum(least)
        self._Z = whitener.to(C.dtype) @ C
        self._thin = factors.thin_product(self._Z, *gradients)
        finite = self._thin.sum((1, 2)).isfinite() if rows else functional.all_finite(*gradients)
        return Look(excitation, self._square, self._p, sound & (excitation >= 0), finite)

    def velocity_step_(self, velocities: Matrices, gradients: Matrices, momentum: float, scale: Tensor) -> None:
        """See :class:`Form`."""
        scale = (scale * self._p).to(self.C.dtype)
        factors.velocity_step_(*velocities, *gradients, self._Z, self._thin, momentum=momentum, scale=scale)

    def update_(self, mean_scale: float, forgetting: float, limit: float, gate: Tensor | None) -> None:
        """See :class:`Form`; a full C is compressed even where the gate is closed, and gets a row of zeros there."""
        if self.rows == self.C.shape[1]:
            self._compress()
        rows, x = self.rows, self._x if gate is None else torch.where(gate, self._x, 0)
        if forgetting != 1:
            beta, left = factors.forget(self.beta, forgetting, limit)
            if gate is not None:
                beta, left = torch.where(gate, beta, self.beta), torch.where(gate, left, 1)
            self.beta.copy_(beta)
            self.M.mul_(left[:, None, None]).diagonal(dim1=-2, dim2=-1).add_(1 - left[:, None])
            self.C.mul_(left.sqrt().to(self.C.dtype)[:, None, None])
        self.C[:, rows] = x * torch.rsqrt(self.beta / mean_scale).unsqueeze(-1)
        # Of the row as it is stored: what M says of a row that was rounded since adds up until P is indefinite.
        row = factors.products(self.C[:, : rows + 1], self.C[:, rows].to(self.M.dtype))
        self.M[:, rows, : rows + 1] = self.M[:, : rows + 1, rows] = row
        self.M[:, rows, rows] += 1
        self._set_rows(rows + 1)

    def _compress(self) -> None:
        strongest, _, beta = factors.compress(self.C, self.beta, self.rank)
        self.C.zero_()[:, : self.rank] = strongest
        self._identity_()
        self.M[:, : self.rank, : self.rank] = factors.gram(strongest)
        self.beta.copy_(beta)
        self._set_rows(self.rank)

    def _identity_(self) -> Tensor:
        """``M ← I`` in place; its diagonal."""
        diagonal: Tensor = self.M.zero_().diagonal(dim1=-2, dim2=-1)
        return diagonal.fill_(1)

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        for entry in self._entries:
            entry["rows"] = rows

    def reset_(self, p0: float) -> None:
        """See :class:`Form`."""
        self.C.zero_()
        self._identity_()
        self.beta.fill_(1 / p0)
        self._set_rows(0)

    def dense(self) -> Tensor:
        """See :class:`Form`."""
        whitener, _ = factors.whitening(self.M[:, : self.rows, : self.rows])
        Z = whitener @ self.C[:, : self.rows].to(whitener.dtype)
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
        return self._entry(self.C[keep], self.M[keep], self.beta[keep])

    def without(self, gone: Tensor) -> InverseState:
        """A new entry, for the inputs that stay: exactly their P, which is the columns of C that stay."""
        C = self._columns_without(gone)
        return self._entry(C, factors.gram(C), self.beta.clone())

    def sliced(self, gone: Tensor) -> InverseState:
        """See :class:`Form`; the columns that stay, whitened by those that go."""
        whitener, _ = factors.whitening(factors.gram(_columns(self.C, gone.to(self.C.device))))
        C = (whitener @ self._columns_without(gone).to(whitener.dtype)).to(self.C.dtype)
        return self._entry(C, factors.gram(C), self.beta.clone())

    def _columns_without(self, gone: Tensor) -> Tensor:
        stay = torch.stack([complement(self.C.shape[-1], rows) for rows in gone.to(self.C.device)])
        return _columns(self.C, stay)

    def anew(self, groups: int, inputs: int, p0: float) -> InverseState:
        """See :class:`Form`."""
        C, M, beta = factors.initial_factors(self.C.new_empty(groups, inputs), p0, self.C.shape[1])
        return {"C": C, "M": M, "beta": beta, "rows": 0, "rank": self.rank}

    def _entry(self, C: Tensor, M: Tensor, beta: Tensor) -> InverseState:
        return {"C": C, "M": M, "beta": beta, "rows": self.rows, "rank": self.rank}


def whole_entry(matrices: Sequence[Tensor]) -> InverseState:
    """P whole, one matrix per group; not copied if there is one."""
    return {"P": matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))}


def _columns(C: Tensor, which: Tensor) -> Tensor:
    """Of each group its own columns, ``(G, m, k)``."""
    return C.gather(-1, which.unsqueeze(-2).expand(-1, C.shape[-2], -1))


def capacity(rank: int) -> int:
    """How many rows C has room for: half as many again, so that it is compressed once in rank/2 steps."""
    return rank + -(-rank // 2)


def in_factors(inputs: int, rank: int | None) -> bool:
    """Whether P of a layer is kept in factors: where C in float32 and M in float64 take less than P."""
    return rank is not None and inputs > 2 * capacity(rank)


def initial_entry(x: Tensor, p0: float, rank: int | None) -> InverseState:
    """``P = p0·I`` for a layer with this mean input ``(G, n)``: in factors, if those are smaller than P."""
    if not in_factors(x.shape[-1], rank):
        return {"P": functional.initial_inverse(x, p0)}
    assert rank is not None
    C, M, beta = factors.initial_factors(x, p0, capacity(rank))
    return {"C": C, "M": M, "beta": beta, "rows": 0, "rank": rank}


def entry_bytes(inputs: int, rank: int | None) -> int:
    """What :func:`initial_entry` takes for each group of a float32 layer on a device with float64."""
    if rank is None or not in_factors(inputs, rank):
        return 4 * inputs**2
    return 4 * capacity(rank) * inputs + 8 * capacity(rank) ** 2 + 8


def form_of(entry: InverseState) -> Form:
    """The form of one layer's P."""
    if "P" in entry:
        return Whole(entry["P"])
    return Factored(**entry, entries=[entry])


def packed_form(entries: Sequence[InverseState]) -> Form:
    """The form of several equal layers' P, which from then on lie in memory one after the other (:func:`pack`)."""
    first = entries[0]
    tensors = {key: pack([(entry, key) for entry in entries]) for key in first if isinstance(first[key], Tensor)}
    if "P" in first:
        return Whole(tensors["P"])
    return Factored(**tensors, rows=first["rows"], rank=first["rank"], entries=entries)


def kind(entry: InverseState) -> tuple[Any, ...]:
    """What has to be equal for layers to be stepped as one."""
    return tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in entry.values())


def moved(entry: InverseState, like: Tensor) -> InverseState:
    """The entry on the device of a mean input, P or C in its dtype; itself, if it is so already."""
    main = entry.get("P", entry.get("C"))
    assert isinstance(main, Tensor)
    if main.device == like.device and main.dtype == like.dtype:
        return entry
    small = factors.wide(like.device)
    return {
        key: v.to(like.device, like.dtype if v is main else small) if isinstance(v, Tensor) else v
        for key, v in entry.items()
    }


def copied(entry: InverseState, device: torch.device) -> InverseState:
    """A copy of the entry on a device, in its own dtypes."""
    return {key: v.to(device, copy=True) if isinstance(v, Tensor) else v for key, v in entry.items()}


def upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's saved state. Version 0.1.0 saved P as a list of diagonal blocks, which becomes P whole."""
    blocks = state.get(INVERSE)
    if not isinstance(blocks, list):
        return state
    by_group = [torch.block_diag(*parts) for parts in zip(*blocks, strict=True)]  # type: ignore[no-untyped-call]
    return state | {INVERSE: {"P": torch.stack(by_group)}}
