"""Removes input features one after another: always the one whose removal raises the held-out loss least.

A feature is removed like a channel: the layer that reads it is refitted by least squares, so that the remaining
features replace it as well as they can. The lost part is its residual, r = (Z P)_d / P_dd, where Z are the inputs with
a column of ones and P is their inverse autocorrelation. So the layer's output without feature d is known without any
refit: y − r·W_d. The held-out loss of that output scores the feature. Noise scores about zero, however large the
weights that over-fit it; of two features with the same information, each scores low as long as the other is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.model.modes import evaluating
from rlsprune.model.tensors import exact
from rlsprune.statistics.inverse import DenseInverse

__all__ = ["Elimination", "Fold", "inverse_autocorrelation", "removal_losses"]

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) → the loss of each row."""

_DAMPING = 1e-3  # share of the mean diagonal
_ENTRIES = 2**22  # hidden values processed at a time


def inverse_autocorrelation(inputs: Tensor) -> Tensor:
    """Returns P of the rows with a last column of ones, slightly damped, in float64."""
    rows = F.pad(exact(inputs), (0, 1), value=1.0)
    A = rows.mT @ rows / len(rows)
    A.diagonal().add_(_DAMPING * A.diagonal().mean())
    return torch.cholesky_inverse(torch.linalg.cholesky(A))


@torch.no_grad()
def removal_losses(model: nn.Sequential, P: Tensor, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Tensor:
    """Returns the mean loss without each feature, in float64.

    Args:
        model: A network whose first layer is an `nn.Linear` with a bias that reads the features.
        P: P of the rows that the network was trained on, with a column of ones.
        inputs: Held-out rows.
        targets: Targets of these rows.
        loss: A function that returns the loss of each row.
    """
    layer, rest = model[0], model[1:]
    assert isinstance(layer, nn.Linear)
    rows = F.pad(exact(inputs), (0, 1), value=1.0)
    residuals = ((rows @ P)[:, :-1] / P.diagonal()[:-1]).to(inputs)
    found: list[Tensor] = []
    with evaluating(model):
        whole = layer(inputs)
        numbers = torch.arange(inputs.shape[1], device=inputs.device)
        for features in torch.split(numbers, max(1, _ENTRIES // max(whole.numel(), 1))):
            without = whole - residuals[:, features].mT[:, :, None] * layer.weight[:, features].mT[:, None]
            outputs = rest(without.flatten(0, 1))
            each = loss(outputs, targets.repeat(len(features), *(1,) * (targets.dim() - 1)))
            found.append(exact(each).view(len(features), len(inputs)).mean(1))
    return torch.cat(found)


@dataclass
class Fold:
    """A network, its training rows, and its held-out rows."""

    network: nn.Sequential
    train: Tensor
    held_out: Tensor


class Elimination:
    """Removal of the same features from several networks, each time the one that raises their held-out loss least.

    Args:
        folds: The networks, trained on all features.
        inputs: All rows.
        targets: Targets of all rows.
        loss: A function that returns the loss of each row.
    """

    def __init__(self, folds: Sequence[Fold], inputs: Tensor, targets: Tensor, loss: RowLoss) -> None:
        self._folds, self._inputs, self._targets, self.loss = folds, inputs, targets, loss
        self.left = list(range(inputs.shape[1]))
        """The features that are left, ascending."""
        self.gone: list[int] = []
        """The removed features, first removed first."""

    def rows(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the features that are left and the targets of some rows."""
        return self._inputs[which][:, self.left], self._targets[which]

    @torch.no_grad()
    def held_out(self) -> tuple[float, float]:
        """Returns the mean loss over the held-out rows of all folds, and the standard error of that mean."""
        losses = []
        for fold in self._folds:
            inputs, targets = self.rows(fold.held_out)
            with evaluating(fold.network):
                losses.append(exact(self.loss(fold.network(inputs), targets)))
        all_rows = torch.cat(losses)
        return float(all_rows.mean()), float(all_rows.std() / len(all_rows) ** 0.5) if len(all_rows) > 1 else 0.0

    @torch.no_grad()
    def take(self, count: int) -> None:
        """Removes features one by one, always the one that raises the held-out loss least, and refits the networks."""
        inverses = [inverse_autocorrelation(self.rows(fold.train)[0]) for fold in self._folds]
        for _ in range(min(count, len(self.left) - 1)):
            losses = exact(torch.zeros(len(self.left), device=self._inputs.device))
            for fold, P in zip(self._folds, inverses, strict=True):
                inputs, targets = self.rows(fold.held_out)
                losses += len(targets) * removal_losses(fold.network, P, inputs, targets, self.loss)
            worst = int(losses.nan_to_num(torch.inf).argmin())
            inverses = [_without(fold.network, P, worst) for fold, P in zip(self._folds, inverses, strict=True)]
            self.gone.append(self.left.pop(worst))


def _without(model: nn.Sequential, P: Tensor, feature: int) -> Tensor:
    """Removes a feature from a network's first layer, refits the rest, and returns the P that is left."""
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    removal = DenseInverse(P).without(torch.tensor([feature]))
    whole = exact(torch.cat([layer.weight, layer.bias[:, None]], 1).mT)
    refitted = removal.refit(whole).mT.to(layer.weight)
    smaller = nn.Linear(layer.in_features - 1, layer.out_features).to(layer.weight)
    smaller.weight.copy_(refitted[:, :-1])
    smaller.bias.copy_(refitted[:, -1])
    model[0] = smaller
    return removal.left().P
