"""Batch norms that mean the same in training mode as in evaluation mode."""

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
    """Gives every batch norm statistics of what it reads now, and changes its scale and shift to make up for it.

    A refit changes what a batch norm reads. Evaluation mode does not see that, training mode does. Afterwards the
    network in evaluation mode computes what it did before, and in training mode the same, on inputs like these.

    In the middle of training the two modes differ already, as running statistics lag behind. With the network as it
    was before the refit, training mode computes what that one does in training mode, and the lag stays what it was.

    Args:
        model: The network.
        batches: What it is called with.
        reduction: The ranks, where each has other batches.
        before: The network before it was cut and refitted; None if its running statistics were those of its inputs.
        kept: Name of a batch norm → which of that network's channels it still has; all if not named.

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
    """The moments of what each batch norm reads, on the calls of all ranks."""
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
    """What a batch norm read and added before the refit, of the channels that it still has."""

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
        """What `merge` takes, on the CPU."""
        mean, squares = (None if own is None else own.cpu() for own in (self.mean, self.squares))
        return self.count, mean, squares, self.several

    def merge(self, count: int, mean: Tensor | None, squares: Tensor | None, several: bool = False) -> None:
        """Adds the values that others are the moments of."""
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
    """In evaluation mode the same function; in training mode, that of the batch norm that the reference is of.

    Evaluation mode computes ``(z − m)γ/s + β`` and is to stay. The refit has put c = (β − β₀)s/γ of what the layer
    computed before into the shift. So training mode has to compute ``(z + c − μ₀)γ/σ₀ + β₀``, with the mean μ₀ and the
    deviation σ₀ that the batch norm read before. What it reads now has μ and σ.
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
    # In new tensors, all computed before the first is replaced: whoever undoes this has kept the old ones.
    new = {
        norm.weight: scale * (now / before).sqrt(),
        norm.bias: shift_before + scale / before.sqrt() * missed,
        norm.running_mean: norm.running_mean.to(mean) - moved + (running / before).sqrt() * missed,
        norm.running_var: (running * now / before - norm.eps).clamp_min(0),
    }
    for tensor, values in new.items():
        replace_data(tensor, values.to(tensor))
