"""P as pruning uses it: row sums, blocks, the refit of a layer's weights, and what is left when inputs go.

Three forms with the same results. :class:`DenseInverse` holds P. :class:`Autocorrelation` holds ``A = P⁻¹`` and inverts
it only where blocks of P are asked for: row sums and refits need one factorisation. :class:`SampleInverse` holds m
sampled rows X of a layer with more inputs than that, and answers for ``P = (XᵀX/m + δI)⁻¹`` without ever forming it:
every answer goes through an m×m matrix, by Woodbury's identity.

Systems are solved in float64, on the CPU where the device has none; a P that comes in float32 stays so otherwise. The
bias, if the layer has one, is the last input.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from rlsprune._tensors import complement, exact

# Shares of the mean diagonal to add, until a block of a P that was kept in float32 can be factored.
_DAMPINGS = (0.0, 1e-7, 1e-5)
_TILE = 128  # rows of a matrix that are worked on at a time


class Inverse(Protocol):
    """Inverse autocorrelation of the inputs of one group of one layer."""

    @property
    def size(self) -> int:
        """How many inputs, with the bias."""

    def row_sums(self, inputs: int) -> Tensor:
        """Signed sums of the first ``inputs`` rows of P over the first ``inputs`` columns (Eq. 26)."""

    def blocks(self, rows: Tensor) -> Tensor:
        """``P_dd`` for each set of rows: ``(units, m)`` → ``(units, m, m)``."""

    def refit(self, weights: Tensor, gone: Tensor) -> Tensor:
        """The least-squares refit of a weight matrix (inputs × outputs) when the rows ``gone`` go.

        Returns:
            ``W_k − P_kd P_dd⁻¹ W_d`` for the rows that stay, in their order.
        """

    def without(self, gone: Tensor) -> Inverse:
        """The inverse autocorrelation of the inputs that stay (a Schur complement of P)."""


class DenseInverse:
    """P itself."""

    def __init__(self, P: Tensor) -> None:
        self.P = P

    @property
    def size(self) -> int:
        """How many inputs, with the bias."""
        return len(self.P)

    def row_sums(self, inputs: int) -> Tensor:
        """See :class:`Inverse`."""
        return exact(self.P[:inputs, :inputs].sum(1))

    def blocks(self, rows: Tensor) -> Tensor:
        """See :class:`Inverse`."""
        return exact(self.P[rows.unsqueeze(-1), rows.unsqueeze(-2)])

    def refit(self, weights: Tensor, gone: Tensor) -> Tensor:
        """See :class:`Inverse`."""
        stay = complement(self.size, gone)
        rows = self.P[gone]
        explained = solve_positive(exact(rows[:, gone]), weights[gone]).to(self.P)
        return weights[stay] - (rows[:, stay].mT @ explained).to(weights)

    def without(self, gone: Tensor) -> DenseInverse:
        """See :class:`Inverse`."""
        stay = complement(self.size, gone)
        rows = self.P[gone]
        factor = cholesky_positive(exact(rows[:, gone])).to(self.P)
        whitened = torch.linalg.solve_triangular(factor, rows[:, stay], upper=False)
        smaller = self.P[stay][:, stay]
        _add_square(smaller, whitened, -1.0)
        return DenseInverse(smaller)


class Autocorrelation:
    """P by way of its inverse, the autocorrelation A."""

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self._dense: DenseInverse | None = None  # once blocks have been asked for

    @property
    def size(self) -> int:
        """How many inputs, with the bias."""
        return len(self.A)

    def row_sums(self, inputs: int) -> Tensor:
        """See :class:`Inverse`."""
        wanted = torch.zeros(self.size, 1, dtype=self.A.dtype, device=self.A.device)
        wanted[:inputs] = 1
        return solve_positive(self.A, wanted)[:inputs, 0]

    def blocks(self, rows: Tensor) -> Tensor:
        """See :class:`Inverse`."""
        if self._dense is None:
            self._dense = DenseInverse(torch.cholesky_inverse(cholesky_positive(self.A)))
        return self._dense.blocks(rows)

    def refit(self, weights: Tensor, gone: Tensor) -> Tensor:
        """See :class:`Inverse`; here as ``W_k + A_kk⁻¹ A_kd W_d``, unless P is there already."""
        if self._dense is not None:
            return self._dense.refit(weights, gone)
        stay = complement(self.size, gone)
        rows = self.A[stay]
        return weights[stay] + solve_positive(rows[:, stay], rows[:, gone] @ weights[gone])

    def without(self, gone: Tensor) -> Autocorrelation:
        """See :class:`Inverse`; of the autocorrelation, rows and columns just go."""
        stay = complement(self.size, gone)
        return Autocorrelation(self.A[stay][:, stay])


class SampleInverse:
    """P of more inputs than rows were sampled, from the rows."""

    def __init__(self, rows: Tensor, damping: float) -> None:
        """Takes the rows.

        Args:
            rows: X, ``(m, n)``.
            damping: δ.
        """
        self.rows, self.damping = rows, damping

    @property
    def size(self) -> int:
        """How many inputs, with the bias."""
        return self.rows.shape[1]

    def _factor(self, rows: Tensor) -> Tensor:
        """Cholesky factor of ``XXᵀ/m + δI``."""
        gram = rows @ rows.mT / len(rows)
        gram.diagonal().add_(self.damping)
        factor: Tensor = torch.linalg.cholesky(gram)
        return factor

    def _whitened(self) -> Tensor:
        """Y with ``P = (I − YᵀY) / δ``."""
        whitened: Tensor = torch.linalg.solve_triangular(self._factor(self.rows), self.rows, upper=False)
        return torch.div(whitened, math.sqrt(len(self.rows)))

    def row_sums(self, inputs: int) -> Tensor:
        """See :class:`Inverse`."""
        whitened = self._whitened()[:, :inputs]
        return torch.div(1 - whitened.mT @ whitened.sum(1), self.damping)

    def blocks(self, rows: Tensor) -> Tensor:
        """See :class:`Inverse`."""
        parts = self._whitened()[:, rows].movedim(1, 0)  # (units, m, rows of a unit)
        identity = torch.eye(rows.shape[-1], dtype=parts.dtype, device=parts.device)
        return (identity - parts.mT @ parts) / self.damping

    def refit(self, weights: Tensor, gone: Tensor) -> Tensor:
        """See :class:`Inverse`; here as ``W_k + X_kᵀ (X_k X_kᵀ/m + δI)⁻¹ X_d W_d / m``."""
        stay = complement(self.size, gone)
        kept = self.rows[:, stay]
        lost = self.rows[:, gone] @ weights[gone] / len(self.rows)
        return weights[stay] + kept.mT @ torch.cholesky_solve(lost, self._factor(kept))

    def without(self, gone: Tensor) -> SampleInverse:
        """See :class:`Inverse`."""
        return SampleInverse(self.rows[:, complement(self.size, gone)], self.damping)


def from_rows(rows: Tensor, damping: float) -> Inverse:
    """P of sampled rows ``(m, n)``, in the cheaper form.

    Args:
        rows: X; the autocorrelation is ``XᵀX/m``.
        damping: Added to its diagonal, as a share of the diagonal's mean.
    """
    m, n = rows.shape
    tiny = torch.finfo(torch.float32).tiny
    if n > m:
        return SampleInverse(exact(rows), damping * max(float(rows.square().mean()), tiny))
    # The damping is far above the rounding of a product in float32, which takes half the time.
    autocorrelation = exact(_add_square(rows.new_zeros(n, n), rows, 1 / m))
    diagonal = autocorrelation.diagonal()
    diagonal += damping * diagonal.mean().clamp_min(tiny)
    return Autocorrelation(autocorrelation)


def _add_square(matrix: Tensor, Y: Tensor, scale: float) -> Tensor:
    """``matrix += scale·YᵀY``, in place; one half is computed, the other mirrored, so it stays symmetric to the bit."""
    for start in range(0, len(matrix), _TILE):
        here, after = slice(start, start + _TILE), slice(start + _TILE, None)
        matrix[here, start:].addmm_(Y[:, here].mT, Y[:, start:], alpha=scale)
        corner = matrix[here, here].triu()
        matrix[here, here] = corner + corner.triu(1).mT
        matrix[after, here] = matrix[here, after].mT
    return matrix


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix⁻¹ right`` for a symmetric positive definite matrix; see `cholesky_positive`."""
    return torch.cholesky_solve(right, cholesky_positive(matrix))


def cholesky_positive(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a symmetric positive definite matrix, damped if rounding made that necessary.

    Raises:
        FloatingPointError: The matrix is not positive definite or not finite.
    """
    for damping in _DAMPINGS:
        damped = matrix.clone()
        diagonal = damped.diagonal(dim1=-2, dim2=-1)
        diagonal += damping * diagonal.mean(-1, keepdim=True)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(damped)
        if bool((info == 0).all()) and bool(factor.isfinite().all()):
            return factor
    raise FloatingPointError("P is not positive definite: optimizer.check() tells which layer's, reset() renews it")
