"""Batch norms that mean the same in training mode as in evaluation mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph.observe import hooked
from rlsprune.model.calls import ExampleInputs, as_call
from rlsprune.model.modes import evaluating
from rlsprune.model.tensors import replace_data
from rlsprune.shrinking.calibration import Reduction

__all__ = ["make_consistent"]


def make_consistent(
    model: nn.Module, batches: Iterable[ExampleInputs], reduction: Reduction | None = None
) -> list[str]:
    """Gives every batch norm the statistics of what it reads now, and changes its scale and shift to make up for it.

    A refit changes what a batch norm reads. Evaluation mode does not see that, training mode does. Afterwards the
    network in evaluation mode computes what it did before, and in training mode the same, on inputs like these.

    Args:
        model: The network.
        batches: What it is called with.
        reduction: The ranks, where each has other batches.

    Returns:
        Names of the batch norms that were left alone, and compute something else in training mode: they have no scale
        and shift of their own, or are called several times, each time with inputs of other statistics.
    """
    norms = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None  # without: the same in both modes
    }
    owners = Counter(id(parameter) for norm in norms for parameter in norm._parameters.values())
    moments: dict[nn.Module, _Moments] = {
        norm: _Moments() for norm in norms if norm.affine and owners[id(norm.weight)] == owners[id(norm.bias)] == 1
    }
    calls: Counter[nn.Module] = Counter()
    several: set[nn.Module] = set()

    def see(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls[norm] += 1
        if calls[norm] > 1:
            several.add(norm)
        elif norm not in several:
            moments[norm].add(inputs[0])

    with hooked(list(moments), see), evaluating(model):
        for batch in batches:
            calls.clear()
            args, kwargs = as_call(batch)
            model(*args, **kwargs)
    usable = [norm for norm in norms if norm in moments and norm not in several]
    everyone = (reduction or Reduction()).gather([moments[norm].state() for norm in usable])
    for norm, *states in zip(usable, *everyone, strict=True):
        together = _Moments()
        for state in states:
            together.merge(*state)
        if together.count > 1:
            _restate(norm, together)
    return [name for norm, name in norms.items() if norm not in usable]


class _Moments:
    """Mean and variance of each channel, in float64 and merged batch by batch, so that nothing cancels."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None

    def add(self, values: Tensor) -> None:
        rows = values.detach().transpose(0, 1).flatten(1) if values.dim() > 2 else values.detach().mT
        wide = rows.to(torch.float64 if rows.device.type != "mps" else torch.float32)
        mean = wide.mean(1)
        self.merge(wide.shape[1], mean, (wide - mean[:, None]).square().sum(1))

    def state(self) -> tuple[int, Tensor | None, Tensor | None]:
        """What `merge` takes, on the CPU."""
        mean, squares = (None if own is None else own.cpu() for own in (self.mean, self.squares))
        return self.count, mean, squares

    def merge(self, count: int, mean: Tensor | None, squares: Tensor | None) -> None:
        """Adds the values that others are the moments of."""
        if mean is None or squares is None:
            return
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, delta = self.count + count, mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total


@torch.no_grad()
def _restate(norm: _BatchNorm, moments: _Moments) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert moments.mean is not None
    assert moments.squares is not None
    mean, squares = (own.to(norm.running_var.device) for own in (moments.mean, moments.squares))
    before = (norm.running_var.to(mean) + norm.eps).sqrt()
    # Training mode divides by the biased variance, and running statistics hold the unbiased one.
    variance = squares / moments.count
    after = (variance + norm.eps).sqrt()
    scale = norm.weight.to(before) / before
    shift = norm.bias.to(before) + scale * (mean - norm.running_mean.to(before))
    replace_data(norm.weight, (scale * after).to(norm.weight))
    replace_data(norm.bias, shift.to(norm.bias))
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
