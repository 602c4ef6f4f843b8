"""DistributedDataParallel around a network that changes its shape."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlsprune.model.calls import wrappers

__all__ = ["rebuild", "rebuild_around"]


def rebuild(wrapper: DistributedDataParallel) -> None:
    """Lets the wrapper start afresh: buckets for the parameters' shapes of now, and hooks at their gradients of now.

    By the way in which a wrapper comes back from a pickle, in place. Communication hooks are kept.
    """
    hooks = list(wrapper._comm_hooks)
    # The old reducer has to go first: it takes its hooks at the gradients with it.
    del wrapper.reducer, wrapper.logger
    wrapper.__setstate__(dict(vars(wrapper)))  # type: ignore[no-untyped-call]
    wrapper._comm_hooks = []
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


def rebuild_around(model: nn.Module) -> None:
    """Rebuilds every wrapper around a model, if there is any."""
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            rebuild(wrapper)
