"""Columns scaled to mean 0 and deviation 1, and the scaling moved into the layers that read or write them.

A layer that reads (x − μ) / σ with weight W and bias b computes the same as a layer that reads x with weight
W' = W / σ and bias b − W' μ. A layer that writes (y − μ) / σ writes y with weight σW and bias σb + μ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.model.selector import kept_inputs

__all__ = ["Scaling"]


@dataclass(frozen=True, eq=False)
class Scaling:
    """Means and deviations of columns, in float64 on the CPU.

    Examples:
        >>> rows = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
        >>> Scaling.of(rows).scaled(rows)
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """

    mean: Tensor
    """μ."""
    deviation: Tensor
    """σ; 1 for a constant column."""

    @classmethod
    def of(cls, rows: Tensor, *, centred: bool = True) -> Scaling:
        """Computes the scaling of the columns of (N, columns); without `centred` μ is 0 and σ the root mean square."""
        values = rows.cpu().double()
        mean = values.mean(0) if centred else torch.zeros_like(values[0])
        deviation = (values - mean).square().mean(0).sqrt()
        rounding = max(1e-9, torch.finfo(rows.dtype).eps) * values.abs().amax(0)
        return cls(mean, torch.where(deviation > rounding, deviation, 1.0))

    def scaled(self, rows: Tensor) -> Tensor:
        """Returns the rows with scaled columns, in their own dtype."""
        return ((rows.cpu().double() - self.mean) / self.deviation).to(rows)

    def unscaled(self, rows: Tensor) -> Tensor:
        """Undoes the scaling of the rows' columns, in float64."""
        return rows.cpu().double() * self.deviation + self.mean

    def add_to_reader(self, layer: nn.Linear) -> None:
        """Makes a layer that reads scaled columns read unscaled ones."""
        mean, deviation = self._read_by(layer)
        weight = layer.weight.double().cpu() / deviation
        _write(layer, weight, _bias(layer) - weight @ mean)

    def take_from_reader(self, layer: nn.Linear) -> None:
        """Makes a layer that reads unscaled columns read scaled ones."""
        mean, deviation = self._read_by(layer)
        weight = layer.weight.double().cpu()
        _write(layer, weight * deviation, _bias(layer) + weight @ mean)

    def add_to_writer(self, layer: nn.Linear) -> None:
        """Makes a layer that writes scaled columns write unscaled ones."""
        weight = layer.weight.double().cpu() * self.deviation[:, None]
        _write(layer, weight, _bias(layer) * self.deviation + self.mean)

    def take_from_writer(self, layer: nn.Linear) -> None:
        """Makes a layer that writes unscaled columns write scaled ones."""
        weight = layer.weight.double().cpu() / self.deviation[:, None]
        _write(layer, weight, (_bias(layer) - self.mean) / self.deviation)

    def _read_by(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        """Returns means and deviations of the columns that a layer has kept."""
        kept = kept_inputs(layer)
        columns: Any = slice(None) if kept is None else kept.cpu()
        return self.mean[columns], self.deviation[columns]


def _bias(layer: nn.Linear) -> Tensor:
    return torch.zeros(()) if layer.bias is None else layer.bias.detach().double().cpu()


@torch.no_grad()
def _write(layer: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(bias)
