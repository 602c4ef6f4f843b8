"""Checks of a pruner's arguments: their kinds, whether the model can be cut, and whether a copy can be followed."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from rlsprune.model.arguments import shown
from rlsprune.model.sharded import obstacle
from rlsprune.prune.surgery import inner

__all__ = ["check_copy", "check_kinds", "check_trained"]


def check_kinds(model: object, optimizer: object) -> None:
    """Raises TypeError if the arguments are swapped or of another kind."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("the model comes first and the optimizer second: Pruner(model, optimizer, example_inputs)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pruner takes a torch.nn.Module as its model, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Pruner takes a torch.optim.Optimizer, not {type(optimizer).__name__}")


def check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError unless the model can be cut and the optimizer trains it."""
    why = obstacle(model)
    if why is not None:
        raise ValueError(f"the model cannot be cut: {why}. Let fully_shard divide dimension 0, without other meshes")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: it could not recover. Unfreeze it first")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters: give the one that trains this model")


def check_copy(copy: nn.Module, model: nn.Module, *, loses_inputs: bool) -> None:
    """Raises unless a copy can be cut along with the model: TypeError if it is no module, else ValueError.

    Args:
        copy: The copy, or an ``AveragedModel`` of it.
        model: The model.
        loses_inputs: Whether input features may go; the indices of those that stay are kept in a buffer.
    """
    if not isinstance(copy, nn.Module):
        raise TypeError(f"follow() takes a copy of the model, not {shown(copy)}")
    shapes, others = (
        {name: tuple(p.shape) for name, p in network.named_parameters()} for network in (model, inner(copy))
    )
    if shapes != others:
        name = next(name for name in {**shapes, **others} if shapes.get(name) != others.get(name))
        raise ValueError(
            f"follow() takes a copy of the model, but {name!r} has the shape {others.get(name)} in the copy and "
            f"{shapes.get(name)} in the model: make it with copy.deepcopy(model)"
        )
    if loses_inputs and isinstance(copy, AveragedModel) and copy.use_buffers:
        raise ValueError(
            "AveragedModel(use_buffers=True) averages buffers that hold indices, such as those of the kept inputs: "
            "make it with use_buffers=False, which copies buffers, or prune with input_ratio=0"
        )
