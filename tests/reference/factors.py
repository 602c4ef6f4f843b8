"""P in factors, slowly: ``A = P⁻¹ = β(I + CᵀC)`` in float64, one layer without groups, every matrix written out.

The same directions are dropped as in `rlsprune.optim.factors`: when C has no room for another row, its strongest
directions stay, and what the others have lost goes to β, spread evenly over all directions that do not stay.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ReferenceFactors:
    """A itself, which loses all but its strongest directions whenever it has gained too many.

    Attributes:
        A: The inverse of P, ``(n, n)``.
        beta: Of the identity in A.
        gained: How many rows A has beyond β·I, zero rows counted.
    """

    def __init__(self, n: int, p0: float, rank: int, capacity: int) -> None:
        self.A = torch.eye(n, dtype=torch.float64) / p0
        self.beta, self.gained = 1 / p0, 0
        self.p0, self.rank, self.capacity = p0, rank, capacity

    def inverse(self) -> Tensor:
        """P."""
        return torch.linalg.inv(self.A)

    def update(self, x: Tensor, mean_scale: float, forgetting: float = 1.0, limit: float = 2.0) -> None:
        """Eq. (16) for A: ``A ← λA + k·xxᵀ``, except that β stays above ``1/(limit·p0)``."""
        if self.gained == self.capacity:
            self.compress()
        n = len(self.A)
        beta = max(forgetting * self.beta, 1 / (limit * self.p0))
        above = self.A - self.beta * torch.eye(n, dtype=torch.float64)  # β·CᵀC
        self.A = beta * torch.eye(n, dtype=torch.float64) + forgetting * above + mean_scale * torch.outer(x, x)
        self.beta = beta
        self.gained += 1

    def compress(self) -> None:
        """Keeps the largest eigenvalues of A; the others become equal, so that the trace stays."""
        values, vectors = torch.linalg.eigh(self.A)
        order = values.argsort(descending=True)
        kept, others = order[: self.rank], order[self.rank :]
        even = values[others].mean()
        self.A = vectors[:, kept] * values[kept] @ vectors[:, kept].T
        self.A += even * vectors[:, others] @ vectors[:, others].T
        self.beta, self.gained = float(even), self.rank
