"""Is a layer's P still what it should be, a symmetric positive definite matrix?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerHealth:
    """Health of one layer's P, over all its groups and blocks."""

    name: str
    inputs: int
    smallest_eigenvalue: float
    largest_eigenvalue: float
    trace: float
    asymmetry: float
    """Largest absolute difference between P and its transpose; 0 unless something else wrote to P."""

    @property
    def healthy(self) -> bool:
        """Finite, symmetric and positive definite."""
        return 0 < self.smallest_eigenvalue < float("inf") and self.asymmetry == 0

    def __str__(self) -> str:
        verdict = "ok" if self.healthy else "NOT POSITIVE DEFINITE, call optimizer.reset()"
        return (
            f"{self.name}: {self.inputs} inputs, eigenvalues {self.smallest_eigenvalue:.3g} … "
            f"{self.largest_eigenvalue:.3g}, trace {self.trace:.4g}, asymmetry {self.asymmetry:.1g}: {verdict}"
        )


def layer_health(name: str, blocks: list[Tensor]) -> LayerHealth:
    """Measures P, given as diagonal blocks ``(groups, b, b)``, in float64 on the CPU."""
    exact = [P.detach().to(device="cpu", dtype=torch.float64) for P in blocks]
    if all(P.isfinite().all() for P in exact):
        eigenvalues = torch.cat([torch.linalg.eigvalsh(P).flatten() for P in exact])
        smallest, largest = eigenvalues.min().item(), eigenvalues.max().item()
    else:
        smallest = largest = float("nan")
    return LayerHealth(
        name=name,
        inputs=sum(P.shape[-1] for P in exact),
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
        trace=sum(P.diagonal(dim1=-2, dim2=-1).sum().item() for P in exact),
        asymmetry=max((P - P.mT).abs().max().item() for P in exact),
    )
