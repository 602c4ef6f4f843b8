"""DistributedDataParallel around a network whose shape changes."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlsprune.model.calls import wrappers

__all__ = ["rebuild", "rebuild_around"]


def rebuild(wrapper: DistributedDataParallel) -> None:
    """Rebuilds the wrapper in place, with buckets and gradient hooks for the parameters' present shapes.

    It does so as if the wrapper were unpickled. Communication hooks are kept.
    """
    hooks = list(wrapper._comm_hooks)
    # The old reducer has to go first, because its gradient hooks go with it.
    del wrapper.reducer, wrapper.logger
    wrapper.__setstate__(dict(vars(wrapper)))  # type: ignore[no-untyped-call]
    wrapper._comm_hooks = []
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


def rebuild_around(model: nn.Module) -> None:
    """Rebuilds every DistributedDataParallel wrapper around a model, if there is any."""
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            rebuild(wrapper)
