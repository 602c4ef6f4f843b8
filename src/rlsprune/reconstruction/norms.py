"""Adapts batch norms so that training mode and evaluation mode compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlsprune.graph.observe import hooked
from rlsprune.model.calls import ExampleInputs, as_call, explained_run
from rlsprune.model.modes import evaluating
from rlsprune.model.tensors import replace_data
from rlsprune.reconstruction.calibration import Reduction

__all__ = ["make_consistent"]


def make_consistent(
    model: nn.Module,
    batches: Iterable[ExampleInputs],
    reduction: Reduction | None = None,
    *,
    before: nn.Module | None = None,
    kept: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Gives every batch norm the statistics of its present inputs, and compensates by its scale and shift.

    A refit changes the inputs of batch norms. That affects training mode, but not evaluation mode. Afterwards the
    network computes the same as before in evaluation mode, and also in training mode, on inputs like these.

    In the middle of training the two modes already differ, because running statistics lag behind. With ``before``,
    training mode computes what that network computes in training mode, and the lag stays as it was.

    Args:
        model: The network.
        batches: Inputs of the network.
        reduction: The ranks, if each has its own batches.
        before: The network before it was cut and refitted; None if its running statistics were those of its inputs.
        kept: Name of a batch norm → the channels of ``before`` that it still has; all if not named.

    Returns:
        Names of the batch norms that were left alone and compute something else in training mode: they have no scale
        and shift of their own, or are called several times, each time with inputs of different statistics.
    """
    norms = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None  # without it both modes are the same
    }
    owners = Counter(id(parameter) for norm in norms for parameter in norm._parameters.values())
    usable = {
        norm: name
        for norm, name in norms.items()
        if norm.affine and owners[id(norm.weight)] == owners[id(norm.bias)] == 1
    }
    calls = list(batches)
    reduction = reduction or Reduction()
    moments = _observed(model, list(usable), calls, reduction)
    theirs = [before.get_submodule(name) for name in usable.values()] if before is not None else []
    earlier = _observed(before, theirs, calls, reduction) if before is not None else []
    for number, (norm, name) in enumerate(usable.items()):
        if moments[number].count > 1 and not moments[number].several:
            stay = None if kept is None else kept.get(name)
            reference = _running(norm) if before is None else _measured(theirs[number], earlier[number], stay)
            _restate(norm, moments[number], reference)
    restated = {norm for norm, own in zip(usable, moments, strict=True) if not own.several}
    return [name for norm, name in norms.items() if norm not in restated]


def _observed(
    model: nn.Module, norms: Sequence[nn.Module], calls: Iterable[ExampleInputs], reduction: Reduction
) -> list[_Moments]:
    """Returns the moments of the inputs of each batch norm, over the calls of all ranks."""
    moments = {norm: _Moments() for norm in norms}
    seen: set[nn.Module] = set()

    def see(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        moments[norm].several |= norm in seen
        moments[norm].add(inputs[0])
        seen.add(norm)

    with hooked(norms, see), evaluating(model):
        for call in calls:
            seen.clear()
            args, kwargs = as_call(call)
            with explained_run(args, kwargs, "a batch"):
                model(*args, **kwargs)
    together = [_Moments() for _ in norms]
    for states in reduction.gather([moments[norm].state() for norm in norms]):
        for own, state in zip(together, states, strict=True):
            own.merge(*state)
    return together


class _Reference(NamedTuple):
    """Input statistics and shift of a batch norm before the refit, for the channels that it still has."""

    mean: Tensor
    variance: Tensor
    shift: Tensor


def _running(norm: _BatchNorm) -> _Reference:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return _Reference(norm.running_mean, norm.running_var, norm.bias.detach())


def _measured(norm: nn.Module, moments: _Moments, stay: Tensor | None) -> _Reference:
    assert isinstance(norm, _BatchNorm)
    assert moments.mean is not None
    assert moments.squares is not None
    values = moments.mean, moments.squares / moments.count, norm.bias.detach()
    return _Reference(*(value if stay is None else value[stay.to(value.device)] for value in values))


class _Moments:
    """Mean and variance of each channel, in float64 and merged batch by batch, so that nothing cancels."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None
        self.several = False
        """Whether one pass of the network called the batch norm several times."""

    def add(self, values: Tensor) -> None:
        rows = values.detach().transpose(0, 1).flatten(1) if values.dim() > 2 else values.detach().mT
        wide = rows.to(torch.float64 if rows.device.type != "mps" else torch.float32)
        mean = wide.mean(1)
        self.merge(wide.shape[1], mean, (wide - mean[:, None]).square().sum(1))

    def state(self) -> tuple[int, Tensor | None, Tensor | None, bool]:
        """Returns the arguments of `merge`, on the CPU."""
        mean, squares = (None if own is None else own.cpu() for own in (self.mean, self.squares))
        return self.count, mean, squares, self.several

    def merge(self, count: int, mean: Tensor | None, squares: Tensor | None, several: bool = False) -> None:
        """Merges the moments of other values into these."""
        self.several |= several
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
def _restate(norm: _BatchNorm, moments: _Moments, reference: _Reference) -> None:
    """Restates a batch norm: the same function in evaluation mode, and that of the reference in training mode.

    Evaluation mode computes ``(z − m)γ/s + β``, and must go on computing it. The refit has moved c = (β − β₀)s/γ of the
    layer's earlier output into the shift. So training mode must compute ``(z + c − μ₀)γ/σ₀ + β₀``, with the mean μ₀ and
    the deviation σ₀ of the earlier inputs. The present inputs have μ and σ.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert moments.mean is not None
    assert moments.squares is not None
    device = norm.running_var.device
    mean, squares = moments.mean.to(device), moments.squares.to(device)
    mean_before, variance_before, shift_before = (value.to(mean) for value in reference)
    # Training mode divides by the biased variance, and running statistics hold the unbiased one.
    now, before = (variance + norm.eps for variance in (squares / moments.count, variance_before))
    running = norm.running_var.to(mean) + norm.eps
    scale, shift = norm.weight.to(mean), norm.bias.to(mean)
    moved = torch.where(scale != 0, (shift - shift_before) * running.sqrt() / scale, 0.0)
    missed = moved + mean - mean_before
    # In new tensors, all computed before the first is replaced: a snapshot refers to the old ones.
    new = {
        norm.weight: scale * (now / before).sqrt(),
        norm.bias: shift_before + scale / before.sqrt() * missed,
        norm.running_mean: norm.running_mean.to(mean) - moved + (running / before).sqrt() * missed,
        norm.running_var: (running * now / before - norm.eps).clamp_min(0),
    }
    for tensor, values in new.items():
        replace_data(tensor, values.to(tensor))
