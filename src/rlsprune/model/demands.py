"""Checks of a network and its example inputs, made before anything else works on them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from rlsprune.model.calls import ExampleInputs, as_call, unwrap

__all__ = ["check_inputs", "check_network"]


def check_network(model: object, *, values: bool = True) -> None:
    """Raises unless a model is a module whose tensors exist, have values, and can be trained.

    Args:
        model: The model, wrapped or not.
        values: Whether the values matter; if not, the model may lie on the meta device.

    Raises:
        TypeError: The model is not a module.
        ValueError: One of its tensors is unfit; the message names it.
    """
    module = unwrap(model)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of the model has no shape yet: run the model once, which gives its lazy layers one"
            )
        if values and tensor.is_meta:
            raise ValueError(
                f"{name!r} of the model is on the meta device, where tensors have no values: give it its weights first"
            )
        if tensor.is_inference():
            raise ValueError(
                f"{name!r} of the model was made inside torch.inference_mode() and can never be trained: make the "
                "model outside of it"
            )


def check_inputs(example_inputs: ExampleInputs, name: str = "example_inputs") -> None:
    """Raises unless all tensors among the inputs are dense and hold at least one example.

    Raises:
        TypeError: They are neither a tensor nor a tuple nor a dict.
        ValueError: A tensor is sparse, nested or empty.
    """
    for leaf in tree_leaves(as_call(example_inputs)):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise ValueError(
                f"{name} holds a tensor of layout {kind}, whose features cannot be told apart: give a dense one"
            )
        if leaf.dim() and not len(leaf):
            raise ValueError(f"{name} holds a tensor of shape {tuple(leaf.shape)}: give at least one example")
