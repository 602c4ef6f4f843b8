"""P as pruning uses it: row sums, blocks, the refit of a layer's weights, and the P that is left when inputs go.

Three forms with the same results. `DenseInverse` holds P. `Autocorrelation` holds ``A = P⁻¹`` and inverts
it only where blocks of P are asked for: row sums and refits need one factorisation. `FactoredInverse` holds few
rows C with ``P = (β(I + CᵀC))⁻¹``, RLS's own or sampled inputs with a damping, and never forms P: every answer goes
through an m×m matrix, by Woodbury's identity.

An autocorrelation of inputs in float32 is factorised in float32: the rounding, a part in 10⁷ of its largest eigenvalue,
is a few per cent of the damping. All else is solved in float64, on the CPU where the device has none; with factors
there is no choice, since ``I − ZᵀZ`` cancels. The bias, if the layer has one, is the last input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rlsprune.model.tensors import complement, exact, sub_matrix
from rlsprune.optim.entries import Form
from rlsprune.optim.factored import Factored

# Shares of the mean diagonal to add, until a block of a P that was kept in float32 can be factored.
_DAMPINGS = (0.0, 1e-7, 1e-5)
_TILE = 128  # rows of a matrix that are worked on at a time


class Inverse(Protocol):
    """Inverse autocorrelation of the inputs of one group of one layer."""

    @property
    def size(self) -> int:
        """Returns the number of inputs, including the bias."""

    def row_sums(self, inputs: int) -> Tensor:
        """Returns signed sums of the first ``inputs`` rows of P over the first ``inputs`` columns (Eq. 26)."""

    def blocks(self, rows: Tensor) -> Tensor:
        """Returns ``P_dd`` for each set of rows: ``(units, m)`` → ``(units, m, m)``."""

    def without(self, gone: Tensor) -> Removal[Inverse]:
        """Returns the refit, and the P that is left, when the inputs ``gone`` go."""


_Left = TypeVar("_Left", bound=Inverse, covariant=True)


@dataclass(frozen=True)
class Removal(Generic[_Left]):
    """The refit, and the P that is left, when some inputs go. Computed lazily, and nothing twice."""

    stay: Tensor
    """The inputs that stay, ascending."""
    refit: Callable[[Tensor], Tensor]
    """Function from a weight matrix (inputs × outputs) to its least-squares refit, ``W_k − P_kd P_dd⁻¹ W_d``: the rows
    that stay, in their order."""
    left: Callable[[], _Left]
    """The inverse autocorrelation of the inputs that stay (a Schur complement of P)."""


class DenseInverse:
    """P itself."""

    def __init__(self, P: Tensor) -> None:
        self.P = P

    @property
    def size(self) -> int:
        """Returns the number of inputs, including the bias."""
        return len(self.P)

    def row_sums(self, inputs: int) -> Tensor:
        """See `Inverse`."""
        return exact(self.P[:inputs, :inputs].sum(1))

    def blocks(self, rows: Tensor) -> Tensor:
        """See `Inverse`."""
        return exact(self.P[rows.unsqueeze(-1), rows.unsqueeze(-2)])

    def without(self, gone: Tensor) -> Removal[DenseInverse]:
        """See `Inverse`."""
        gone = gone.to(self.P.device)
        stay = complement(self.size, gone)

        @cache
        def split() -> tuple[Tensor, Tensor]:
            """Returns L, the Cholesky factor of P_dd, and ``L⁻¹ P_dk``."""
            rows = self.P.index_select(0, gone)
            factor = cholesky_positive(exact(rows.index_select(1, gone)))
            return factor, solve_lower(factor.to(self.P), rows.index_select(1, stay))

        def refit(weights: Tensor) -> Tensor:
            factor, whitened = split()
            explained = solve_lower(factor, _rows(weights, gone).to(factor)).to(self.P)
            return _rows(weights, stay) - (whitened.mT @ explained).to(weights)

        @cache
        def left() -> DenseInverse:
            return DenseInverse(_add_square(sub_matrix(self.P, stay), split()[1], -1.0))

        return Removal(stay, refit, left)


class Autocorrelation:
    """P given by its inverse, the autocorrelation A."""

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self._dense: DenseInverse | None = None  # once blocks have been asked for

    @property
    def size(self) -> int:
        """Returns the number of inputs, including the bias."""
        return len(self.A)

    @cached_property
    def _factor(self) -> Tensor:
        return cholesky_positive(self.A)

    def row_sums(self, inputs: int) -> Tensor:
        """See `Inverse`."""
        wanted = torch.zeros(self.size, 1, dtype=self.A.dtype, device=self.A.device)
        wanted[:inputs] = 1
        return exact(torch.cholesky_solve(wanted, self._factor)[:inputs, 0])

    def blocks(self, rows: Tensor) -> Tensor:
        """See `Inverse`."""
        if self._dense is None:
            self._dense = DenseInverse(torch.cholesky_inverse(self._factor))
        return self._dense.blocks(rows)

    def without(self, gone: Tensor) -> Removal[Autocorrelation | DenseInverse]:
        """See `Inverse`; refits as ``W_k + A_kk⁻¹ A_kd W_d``, unless P is there already."""
        if self._dense is not None:
            return self._dense.without(gone)
        gone = gone.to(self.A.device)
        stay = complement(self.size, gone)

        @cache
        def left() -> Autocorrelation:
            return Autocorrelation(sub_matrix(self.A, stay))

        def refit(weights: Tensor) -> Tensor:
            explaining = _rows(self.A, stay).index_select(1, gone) @ _rows(weights, gone).to(self.A)
            return _rows(weights, stay) + torch.cholesky_solve(explaining, left()._factor).to(weights)

        return Removal(stay, refit, left)


class FactoredInverse:
    """``P = (β(I + CᵀC))⁻¹`` with fewer rows in C than inputs."""

    def __init__(self, rows: Tensor, beta: float) -> None:
        """Takes the factors.

        Args:
            rows: C, ``(m, n)``.
            beta: β.
        """
        self.rows, self.beta = exact(rows), beta

    @property
    def size(self) -> int:
        """Returns the number of inputs, including the bias."""
        return self.rows.shape[1]

    @cached_property
    def _factor(self) -> Tensor:
        """Returns the Cholesky factor of ``I + CCᵀ``."""
        m = len(self.rows)
        gram = _add_square(torch.eye(m, dtype=self.rows.dtype, device=self.rows.device), self.rows.mT, 1.0)
        return cholesky_positive(gram)

    @cached_property
    def _whitened(self) -> Tensor:
        """Returns Z with ``P = (I − ZᵀZ) / β``."""
        return solve_lower(self._factor, self.rows)

    def row_sums(self, inputs: int) -> Tensor:
        """See `Inverse`."""
        whitened = self._whitened[:, :inputs]
        return torch.div(1 - whitened.mT @ whitened.sum(1), self.beta)

    def blocks(self, rows: Tensor) -> Tensor:
        """See `Inverse`."""
        parts = self._whitened.mT.contiguous()[rows]  # (units, rows of a unit, m)
        identity = torch.eye(rows.shape[-1], dtype=parts.dtype, device=parts.device)
        return (identity - parts @ parts.mT) / self.beta

    def without(self, gone: Tensor) -> Removal[FactoredInverse]:
        """See `Inverse`; refits as ``W_k + C_kᵀ (I + C_k C_kᵀ)⁻¹ C_d W_d``."""
        gone = gone.to(self.rows.device)
        stay = complement(self.size, gone)

        @cache
        def left() -> FactoredInverse:
            return FactoredInverse(self.rows.index_select(1, stay), self.beta)

        def refit(weights: Tensor) -> Tensor:
            if "_whitened" in self.__dict__ and len(gone) < len(self.rows):
                return self._refit_by_whitened(weights, gone, stay)
            lost = self.rows.index_select(1, gone) @ _rows(weights, gone).to(self.rows)
            explaining = torch.cholesky_solve(lost, left()._factor)
            # The largest product and the sum are in the dtype of the weights.
            return _rows(weights, stay) + left().rows.to(weights).mT @ explaining.to(weights)

        return Removal(stay, refit, left)

    def _refit_by_whitened(self, weights: Tensor, gone: Tensor, stay: Tensor) -> Tensor:
        """Computes the same refit as ``W_k + Z_kᵀ Z_d (I − Z_dᵀZ_d)⁻¹ W_d``: a smaller system, once Z is known."""
        known = self._whitened.index_select(1, gone)
        unknown = torch.eye(len(gone), dtype=known.dtype, device=known.device) - known.mT @ known
        lost = torch.cholesky_solve(_rows(weights, gone).to(known), cholesky_positive(unknown))
        return _rows(weights, stay) + self._whitened.index_select(1, stay).to(weights).mT @ (known @ lost).to(weights)


def inverses_of(form: Form) -> list[Inverse]:
    """Converts P of a layer, as the optimizer keeps it, to one `Inverse` per group for scores and refits."""
    if isinstance(form, Factored):
        return [FactoredInverse(C, float(beta)) for C, beta in zip(form.C[:, : form.rows], form.beta, strict=True)]
    return [DenseInverse(P) for P in form.dense()]


def from_rows(rows: Tensor, damping: float) -> Inverse:
    """Computes P of sampled rows, ``(m, n)``, in the cheaper form.

    Args:
        rows: X; the autocorrelation is ``XᵀX/m``.
        damping: Share of the diagonal's mean that is added to the diagonal.
    """
    m, n = rows.shape
    tiny = torch.finfo(torch.float32).tiny
    if n > m:
        beta = damping * max(float(rows.square().mean()), tiny)
        return FactoredInverse(exact(rows) / math.sqrt(m * beta), beta)
    autocorrelation = _add_square(rows.new_zeros(n, n), rows, 1 / m)
    diagonal = autocorrelation.diagonal()
    diagonal += damping * diagonal.mean().clamp_min(tiny)
    return Autocorrelation(autocorrelation)


def _add_square(matrix: Tensor, Y: Tensor, scale: float) -> Tensor:
    """Adds ``scale·YᵀY`` to a matrix in place; computes one half and mirrors it, so it stays symmetric to the bit."""
    for start in range(0, len(matrix), _TILE):
        here, after = slice(start, start + _TILE), slice(start + _TILE, None)
        matrix[here, start:].addmm_(Y[:, here].mT, Y[:, start:], alpha=scale)
        corner = matrix[here, here].triu()
        matrix[here, here] = corner + corner.triu(1).mT
        matrix[after, here] = matrix[here, after].mT
    return matrix


def _rows(matrix: Tensor, which: Tensor) -> Tensor:
    return matrix.index_select(0, which.to(matrix.device))


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """Computes ``L⁻¹ right`` for a lower triangular L."""
    solution: Tensor = torch.linalg.solve_triangular(factor, right, upper=False)
    return solution


def cholesky_positive(matrix: Tensor) -> Tensor:
    """Computes the Cholesky factor of a symmetric positive definite matrix, damped if rounding made that necessary.

    Raises:
        FloatingPointError: The matrix is not positive definite or not finite.
    """
    for damping in _DAMPINGS:
        damped = matrix
        if damping:
            damped = matrix.clone()
            diagonal = damped.diagonal(dim1=-2, dim2=-1)
            diagonal += damping * diagonal.mean(-1, keepdim=True)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(damped)
        # A number that is not finite makes the pivot of its row so; pivots are positive, so their sum tells.
        if not bool(info.any()) and bool(factor.diagonal(dim1=-2, dim2=-1).sum().isfinite()):
            return factor
    raise FloatingPointError(
        "P is not positive definite. If it is RLS's own, optimizer.check() finds the layer and reset() renews its P; "
        "with exact statistics, check that the layers' inputs are finite and sample more batches"
    )
