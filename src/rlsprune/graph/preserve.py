"""Running somebody's network for our own ends and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode, every parameter traceable by autograd. Afterwards: everything as it was.

    That is the mode of every submodule, ``requires_grad``, buffers, hooks, a compiled call, and the random state.
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    hooks = [set(module._forward_hooks) for module in modules]
    compiled = [module._compiled_call_impl for module in modules]
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    wanted_grad = [parameter.requires_grad for parameter in parameters]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with ExitStack() as stack:
        stack.enter_context(_forked_random_state(model))
        stack.enter_context(torch.enable_grad())
        try:
            for module in modules:
                # Not module.eval(): a class may override it to do more than this.
                module.training = False
                module._compiled_call_impl = None
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
        finally:
            for module, mode, ours, call in zip(modules, training, hooks, compiled, strict=True):
                module.training = mode
                module._compiled_call_impl = call
                for key in set(module._forward_hooks) - ours:
                    # The hooks of a trace that failed half-way.
                    del module._forward_hooks[key]
            for parameter, flag in zip(parameters, wanted_grad, strict=True):
                parameter.requires_grad_(flag)
            for module, name, buffer, version, values in buffers:
                module._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(values)


@contextmanager
def _forked_random_state(model: nn.Module) -> Iterator[None]:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        yield
