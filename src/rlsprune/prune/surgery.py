"""Removing channels in place: the same Parameter objects, smaller, and the optimizer's memory of them with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from rlsprune.graph.cuts import Cuts, cut
from rlsprune.model.tensors import replace_data


def apply_cuts(
    model: nn.Module, cuts: Cuts, optimizer: Optimizer | None = None, copies: Iterable[nn.Module] = ()
) -> None:
    """Do what the plan says, to the network, its optimizer's state and structurally equal copies.

    Parameters and buffers stay the same objects with new data, in new storage: the old tensors are not written to.
    ``.grad`` of a cut parameter is dropped; ``requires_grad``, hooks and memory format stay. Of the optimizer's
    state, every tensor with as many dimensions as its parameter is cut along those that have the parameter's size;
    all else (step counts, entries that are no tensors) is left to its owner. Everything is computed before anything
    is changed, so an error leaves all as it was.

    Args:
        model: The network that the plan was made for.
        cuts: The plan, from ``plan_cuts``.
        optimizer: Whose state mirrors the parameters.
        copies: Networks of the same structure, such as moving averages of it.

    Raises:
        ValueError: if a tensor is missing or has another shape than the plan says.
    """
    changes: list[Callable[[], None]] = []
    for number, network in enumerate([model, *copies]):
        what = "the model" if number == 0 else f"copy {number} of the model"
        changes += _changes(inner(network), cuts, optimizer, what)
    for change in changes:
        change()


def inner(copy: nn.Module) -> nn.Module:
    """The network itself, of a copy that may be wrapped in an ``AveragedModel``."""
    return copy.module if isinstance(copy, AveragedModel) else copy


def _changes(model: nn.Module, cuts: Cuts, optimizer: Optimizer | None, what: str) -> list[Callable[[], None]]:
    changes: list[Callable[[], None]] = []
    done: set[int] = set()
    for name, dims in cuts.tensors.items():
        tensor = _tensor(model, name)
        if tensor is None or tensor.shape != cuts.shapes[name]:
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ValueError(f"{name} of {what} {found}, the plan is for shape {tuple(cuts.shapes[name])}")
        if id(tensor) in done:
            # Shared by two layers, which the plan cuts alike.
            continue
        done.add(id(tensor))
        changes.append(partial(replace_data, tensor, cut(tensor, dims)))
        if optimizer is not None and tensor in optimizer.state:
            state = optimizer.state[tensor]
            changes.append(partial(state.update, _cut_state(state, tensor, dims)))
    for module, values in cuts.attributes.items():
        layer = model.get_submodule(module)
        changes += [partial(setattr, layer, name, value) for name, value in values.items()]
    return changes


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    path, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module._buffers[own] if own in module._buffers else module._parameters.get(own)


def _cut_state(state: dict[str, object], parameter: Tensor, dims: dict[int, Tensor]) -> dict[str, Tensor]:
    """The entries that mirror the parameter, cut; Adafactor's row and column statistics only where they mirror it."""
    smaller: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim == parameter.ndim > 0:
            mirrored = {dim: keep for dim, keep in dims.items() if value.shape[dim] == parameter.shape[dim]}
            if mirrored:
                smaller[key] = cut(value, mirrored)
    return smaller
