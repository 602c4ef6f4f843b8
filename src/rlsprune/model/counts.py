"""Parameters, weights and FLOPs of a model. FLOPs are counted in one run, on a copy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from rlsprune.model.calls import ExampleInputs, as_call, explained_run, unwrap
from rlsprune.model.modes import evaluating, inference, plain_attention, preserved
from rlsprune.model.sizes import is_experts, is_transposed_linear

__all__ = ["count", "flops_per_weight", "parameter_count", "weight_count", "weight_names"]


def count(model: nn.Module, example_inputs: ExampleInputs) -> tuple[int, int]:
    """Counts parameters and FLOPs in one run of the model, without timing. `Profile` defines both."""
    return parameter_count(model), sum(_flops(model, example_inputs)["Global"].values())


def flops_per_weight(model: nn.Module, example_inputs: ExampleInputs) -> tuple[dict[str, int] | None, int]:
    """Counts the FLOPs that each weight of a linear or convolution layer takes, by the layer's name, and all FLOPs.

    The FLOPs of these layers are proportional to their weights, so this tells what the model costs when it has lost
    some of its channels. It is None if other operations count too, or a layer is not a plain one. The model itself
    runs, not a copy.
    """
    args, kwargs = as_call(example_inputs)
    with preserved(unwrap(model)), torch.no_grad():
        counts = _flops_of(unwrap(model), args, kwargs)
    root, every = type(unwrap(model)).__name__, sum(counts["Global"].values())
    rates: dict[str, int] = {}
    total = 0
    for name, module in unwrap(model).named_modules():
        flops = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        if flops and (isinstance(module, nn.Linear | _ConvNd) or is_transposed_linear(module)):
            weight = module._parameters.get("weight")
            if weight is None:
                return None, every  # it is computed from other parameters
            rates[name] = flops // weight.numel()
            total += rates[name] * weight.numel()
    return rates if total == every else None, every


def _flops(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, dict[Any, int]]:
    """Counts FLOPs by module and operation in one run of a copy; ``"Global"`` has them all."""
    with inference(model, example_inputs) as (plain, args, kwargs):
        return _flops_of(plain, args, kwargs)


def _flops_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, dict[Any, int]]:
    counter = FlopCounterMode(display=False)
    with explained_run(args, kwargs), _frozen(model), _plain_products(), counter:
        model(*args, **kwargs)
    return {"Global": {}, **counter.get_flop_counts()}


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freezes all parameters in the block: torch's counter cannot follow a view of a trained one through a module."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _plain_products() -> Iterator[None]:
    """Runs attention and recurrent layers as the products that they are made of, which cost the same and are counted.

    The counter knows neither the fused attention of the CPU nor the LSTM of oneDNN and the recurrent layers of cuDNN.
    """
    with plain_attention(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        onednn = torch.backends.mkldnn.flags(enabled=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about another setting, which keeps its value
            onednn.__enter__()
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                onednn.__exit__(None, None, None)


def parameter_count(model: nn.Module) -> int:
    """Counts the elements of all parameters; a tensor with several names counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_count(model: nn.Module) -> int:
    """Counts weights of linear, convolution, recurrent and embedding layers and attention's projections, each once."""
    weights: dict[int, int] = {}
    with evaluating(model):  # in training a spectral norm takes a step at each access to its weight
        for module in model.modules():
            for name in weight_names(module):
                weight = getattr(module, name)
                if weight is not None:
                    owner = module._parameters.get(name)  # a parametrised weight is computed anew at each access
                    weights[id(module) if owner is None else id(owner)] = weight.numel()
    return sum(weights.values())


def weight_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's own weights: matrices, kernels and tables, no biases and no scales."""
    known = nn.Linear | _ConvNd | nn.Bilinear | nn.Embedding | nn.EmbeddingBag
    if isinstance(module, known) or is_transposed_linear(module):
        return ["weight"]
    if isinstance(module, nn.MultiheadAttention):
        return ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    if is_experts(module):
        return list(module._parameters)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [name for name in module._parameters if name.startswith("weight")]
    return []
