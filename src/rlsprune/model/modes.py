"""Ways to run a user's model that leave no trace of it: modes, gradients, buffers and random numbers as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.model.calls import ExampleInputs, as_call, bare_copy, device_of, explained_run
from rlsprune.model.demands import check_inputs, check_network
from rlsprune.model.interrupts import stop_if_interrupted, uninterrupted
from rlsprune.model.tensors import replace_data

__all__ = [
    "evaluate",
    "evaluating",
    "forked_random_state",
    "inference",
    "kept_buffers",
    "outside_autocast",
    "plain_attention",
    "preserved",
    "refuse_inference_mode",
    "run_once",
    "uncompiled",
]


@contextlib.contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """Runs the block in `eval()` and without gradients, and restores every module's mode."""
    modes = {module: module.training for network in networks for module in network.modules()}
    try:
        for network in networks:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def inference(
    model: nn.Module, example_inputs: ExampleInputs
) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Yields a copy of the model and the arguments to run it with: in `eval()`, without gradients, leaving no trace.

    The copy shares the model's parameters. The random number generators are restored afterwards.
    """
    check_network(model, values=False)
    check_inputs(example_inputs)
    args, kwargs = as_call(example_inputs)
    plain = bare_copy(model, share_parameters=True).eval()
    device = device_of(plain, (args, kwargs))
    generators = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(generators, device_type=generators[0].type if generators else "cuda"), torch.no_grad():
        yield plain, args, kwargs


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs the block without the code that ``model.compile()`` made, which skips hooks."""
    calls = {module: module._compiled_call_impl for module in model.modules()}
    try:
        for module in calls:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Runs the block in evaluation mode, with every parameter traceable by autograd, and restores everything.

    It restores the mode of every submodule, ``requires_grad``, buffers, hooks, a compiled call and the random state.
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    hooks = [set(module._forward_hooks) for module in modules]
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    wanted_grad = [parameter.requires_grad for parameter in parameters]
    with contextlib.ExitStack() as stack:
        stack.enter_context(forked_random_state(model))
        stack.enter_context(kept_buffers(modules))
        stack.enter_context(uncompiled(model))
        stack.enter_context(torch.enable_grad())
        try:
            for module in modules:
                # Not module.eval(): a class may override it to do more than this.
                module.training = False
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
        finally:
            for module, mode, ours in zip(modules, training, hooks, strict=True):
                module.training = mode
                for key in set(module._forward_hooks) - ours:
                    # Hooks of a trace that failed half-way.
                    del module._forward_hooks[key]
            for parameter, flag in zip(parameters, wanted_grad, strict=True):
                parameter.requires_grad_(flag)


@contextlib.contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores the modules' own buffers, whatever the block writes to them."""
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, values in buffers:
            module._buffers[name] = buffer
            # Fused kernels, such as that of fake quantisation, write without counting it as a version.
            if buffer.shape != values.shape:
                replace_data(buffer, values)
            elif buffer._version != version or not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)


def refuse_inference_mode(what: str) -> None:
    """Raises inside ``torch.inference_mode()``, where new tensors can never be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what} makes new weights, and those made inside torch.inference_mode() cannot be trained: call it "
            "outside, or use torch.no_grad()"
        )


@contextlib.contextmanager
def outside_autocast(model: nn.Module) -> Iterator[None]:
    """Switches autocast off, which would solve systems in half precision and remember weights that are gone.

    An autocast that the network or a held-out loss enters forgets its half-precision weights when it is left, but only
    if it is the outermost one: so the block makes it the outermost.
    """
    kinds = {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    depth = torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind, on in enabled.items():
            torch.set_autocast_enabled(kind, on)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()


def run_once(model: nn.Module, example_inputs: ExampleInputs) -> Any:
    """Runs the model itself on the example, in evaluation mode and without gradients. Leaves no trace."""
    args, kwargs = as_call(example_inputs)
    with uninterrupted(), preserved(model), torch.no_grad():
        return model(*args, **kwargs)


def evaluate(model: nn.Module, batches: Iterable[Any], example_inputs: ExampleInputs) -> int:
    """Runs the model itself, with its hooks, over batches in `eval()`, and restores its mode.

    Args:
        model: The network.
        batches: Inputs as the model takes them, or (inputs, targets) pairs as a data loader gives them.
        example_inputs: Inputs of a single call, to tell the two apart.

    Returns:
        The number of batches.
    """
    kind = next(kind for kind in (Tensor, Mapping, tuple, list) if isinstance(example_inputs, kind))
    count = 0
    with uninterrupted(), evaluating(model), uncompiled(model):
        for batch in batches:
            stop_if_interrupted()
            paired = isinstance(batch, tuple | list) and len(batch) > 0 and isinstance(batch[0], kind)
            args, kwargs = as_call(batch[0] if paired else batch)
            with explained_run(args, kwargs, "a batch"):
                model(*args, **kwargs)
            count += 1
    return count


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Switches off attention's fused inference path, which is opaque to FLOP counting and exporters."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def forked_random_state(model: nn.Module) -> Iterator[None]:
    """Restores the random state of the CPU and of the model's devices."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        yield
