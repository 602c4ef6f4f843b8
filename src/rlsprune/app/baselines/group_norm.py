"""Scores of torch-pruning's own method, for comparison with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rlsprune.graph.groups import Group
from rlsprune.graph.layers import axis_of
from rlsprune.graph.observe import Call
from rlsprune.model.calls import ExampleInputs, output_tensors
from rlsprune.model.modes import preserved


def group_norms(model: nn.Module, example_inputs: ExampleInputs, groups: Sequence[Group]) -> list[Tensor]:
    """Computes torch-pruning's group norms: squared L2 norms, averaged over the layers, divided by their mean.

    The network runs in evaluation mode and is left exactly as it was.

    Args:
        model: The network.
        example_inputs: The inputs with which it is called.
        groups: Groups of this network that layers produce, from ``find_groups``.

    Returns:
        A vector over the units of each group, on the CPU.
    """
    # Imported here because it is slow to import and only a prune needs it.
    from torch_pruning.pruner.importance import GroupMagnitudeImportance

    importance = GroupMagnitudeImportance(p=2)
    found: list[Tensor] = []
    with preserved(model):
        graph = dependencies(model, Call.of(example_inputs))
        for group in groups:
            root = group.producers[0]
            channels = list(range(axis_of(root.module, "out").size))
            cut = graph.get_pruner_of_module(root.module).prune_out_channels
            scores: Tensor = importance(graph.get_pruning_group(root.module, cut, channels))
            # A unit of a grouped convolution consists of several of its channels.
            found.append(scores.detach().cpu()[root.index].sum(1))
    return found


def dependencies(model: nn.Module, call: Call) -> Any:
    """Builds torch-pruning's dependency graph of a network, which runs on the call's arguments."""
    # Imported here because it is slow to import and only this method needs it.
    import torch_pruning

    def outputs(*_: Any) -> list[Tensor]:
        # After one more operation, torch-pruning sees an output even if a layer's own result is returned.
        found = output_tensors(model(*call.args, **call.kwargs))
        return [tensor * 1 for tensor in found if tensor.grad_fn is not None]

    return torch_pruning.DependencyGraph().build_dependency(model, call.args, forward_fn=outputs, verbose=False)
