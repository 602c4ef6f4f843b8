"""The health of a layer's P, which must stay symmetric and positive definite."""

from __future__ import annotations

from dataclasses import dataclass

from rlsprune.optim.entries import Form


@dataclass(frozen=True)
class LayerHealth:
    """Health of one layer's P, over all its groups."""

    name: str
    inputs: int
    smallest_eigenvalue: float
    largest_eigenvalue: float
    trace: float
    asymmetry: float
    """Largest absolute difference between P and its transpose; 0 unless something else wrote to P."""

    @property
    def healthy(self) -> bool:
        """Whether P is finite, symmetric and positive definite."""
        return 0 < self.smallest_eigenvalue < float("inf") and self.asymmetry == 0

    def __str__(self) -> str:
        verdict = "ok" if self.healthy else "NOT POSITIVE DEFINITE, call optimizer.reset()"
        return (
            f"{self.name}: {self.inputs} inputs, eigenvalues {self.smallest_eigenvalue:.3g} … "
            f"{self.largest_eigenvalue:.3g}, trace {self.trace:.4g}, asymmetry {self.asymmetry:.1g}: {verdict}"
        )


def layer_health(name: str, form: Form) -> LayerHealth:
    """Measures P in float64 on the CPU."""
    eigenvalues = form.eigenvalues()
    return LayerHealth(
        name=name,
        inputs=eigenvalues.shape[-1],
        smallest_eigenvalue=eigenvalues.min().item(),
        largest_eigenvalue=eigenvalues.max().item(),
        trace=eigenvalues.sum().item(),
        asymmetry=form.asymmetry(),
    )
