"""From torch-pruning's dependencies to groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlsprune.graph.groups import Axis, Group, Member
from rlsprune.graph.layers import Side, axis_of, sides
from rlsprune.graph.observe import Call, Observation
from rlsprune.graph.offsets import channel_offset
from rlsprune.graph.slots import Slots
from rlsprune.model.calls import output_tensors

# What removing channels from these layers means differs from what torch-pruning would do to them.
_LEFT_ALONE: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.LayerNorm, "normalises over the whole width"),
    (nn.RMSNorm, "normalises over the whole width"),
    (nn.MultiheadAttention, "is attention, whose embedding width stays"),
    (nn.RNNBase, "is a recurrent layer, which is not supported"),
)


# Far more than a layer that is flattened has, and few enough to be found in seconds.
_MOST_CHANNELS = 2**18


class _EndlessError(Exception):
    """A walk that would not end."""


class _Channel(NamedTuple):
    """A channel at some point of the network and the channel of the root it comes from, as torch-pruning names them."""

    idx: int
    root_idx: int


def trace_groups(
    model: nn.Module, call: Call, seen: Observation, ignore: Collection[str]
) -> tuple[list[Group], dict[str, str]]:
    """Find the groups of a network, not verified yet.

    Returns:
        The groups in the order in which the network runs, and name → reason of those that must be left alone.
    """
    graph = dependencies(model, call)
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    owners = {
        id(parameter): (module, f"{name}.{own}" if name else own)
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    }
    slots = Slots()
    roots = [m for m in graph.module2node if isinstance(m, nn.Module) and m in seen.order and "out" in sides(m)]
    for module in sorted(roots, key=lambda m: seen.order[m]):
        size = axis_of(module, "out").size
        start = slots.add((names[module], "out"), size, module)
        # What an earlier root reached is tied already, and so is all that depends on it.
        fresh = [channel for channel in range(size) if start + channel not in slots.reached]
        try:
            for node, handler, channels in _dependents(graph, module, fresh):
                _tie_dependents(slots, node, handler, channels, start, names, owners)
        except _EndlessError as error:
            slots.trouble.update(dict.fromkeys((start + channel for channel in fresh), str(error)))
    slots.settle_readings()
    slots.tie_inside_layers()
    slots.tie_shared_parameters()
    return _collect(slots, seen, ignore)


def dependencies(model: nn.Module, call: Call) -> Any:
    """torch-pruning's dependency graph of a network, which runs on the call's arguments; not traced any further."""
    # Imported here because it is slow to import and only a prune needs it.
    import torch_pruning

    def outputs(*_: Any) -> list[Tensor]:
        found = [tensor for tensor in output_tensors(model(*call.args, **call.kwargs)) if tensor.grad_fn is not None]
        if not found:
            raise ValueError(
                "no output of the model depends on its parameters: its forward runs under torch.no_grad(), detaches "
                "what it returns, or returns no tensors; call it with gradients enabled"
            )
        # After one more operation torch-pruning sees an output even where a layer's own result is returned.
        return [tensor * 1 for tensor in found]

    return torch_pruning.DependencyGraph().build_dependency(model, call.args, forward_fn=outputs, verbose=False)


def _dependents(graph: Any, root: nn.Module, channels: list[int]) -> Iterator[tuple[Any, str, list[_Channel]]]:
    """Walk all that changes when output channels of the root go: node, function that would cut it, channels.

    torch-pruning's own walk merges what it finds and so forgets that two channels of one layer depend on each other.

    Raises:
        _EndlessError: The maps lead in a circle, to more and more channels that there are not.
    """
    handler = graph.get_pruner_of_module(root).prune_out_channels
    stack = [(graph.module2node[root], handler, [_Channel(i, i) for i in channels])] if channels else []
    visited: dict[Any, set[_Channel]] = defaultdict(set)
    while stack:
        node, handler, found = stack.pop()
        known = visited[id(node), handler]
        fresh = [channel for channel in found if channel not in known]
        if not fresh:
            continue
        known.update(fresh)
        if len(known) > _MOST_CHANNELS:
            raise _EndlessError("torch-pruning maps its channels in a circle")
        yield node, handler.__name__, fresh
        for dependency in node.dependencies:
            if dependency.is_triggered_by(handler):
                mapped = fresh
                for mapping in dependency.index_mapping:
                    mapped = mapping(mapped) if mapping is not None else mapped
                if all(mapping is None for mapping in dependency.index_mapping):
                    mapped = _moved(mapped, node, dependency.target)
                if mapped:
                    stack.append((dependency.target, dependency.handler, mapped))


def _moved(channels: list[_Channel], source: Any, target: Any) -> list[_Channel]:
    """Channels on their way from one node to the next, where padding or slicing gives them other numbers.

    torch-pruning takes both for functions that leave every channel in its place. At such a node channels are numbered
    as they come out of it.
    """
    if target in source.inputs and (offset := channel_offset(source.grad_fn)) is not None:
        before = [channel._replace(idx=channel.idx - offset.shift) for channel in channels]
        return [channel for channel in before if channel.idx in offset.inputs]
    if source in target.inputs and (offset := channel_offset(target.grad_fn)) is not None:
        inside = [channel for channel in channels if channel.idx in offset.inputs]
        return [channel._replace(idx=channel.idx + offset.shift) for channel in inside]
    return channels


def _tie_dependents(
    slots: Slots,
    node: Any,
    handler: str,
    channels: list[_Channel],
    root_start: int,
    names: dict[Any, str],
    owners: dict[int, tuple[nn.Module, str]],
) -> None:
    """Tie the channels of one node to the channels of the root that they depend on."""
    target, dim = node.module, None
    roots = [root_start + channel.root_idx for channel in channels if channel.root_idx is not None]
    if isinstance(target, nn.Parameter):
        module, name = owners[id(target)]
        dim = node.pruning_dim
        axis, size = (name, _BOTH), target.shape[dim]
    elif target in names:
        module, name = target, names[target]
        own = sides(module)
        axis = (name, own[0] if len(own) == 1 else "in" if handler == "prune_in_channels" else "out")
        size = axis_of(module, axis[1]).size if own else 0
    else:
        if type(target).__name__ == "_OutputOp":
            slots.trouble.update(dict.fromkeys(roots, "its channels reach the network's output"))
        return
    for kind, why in _LEFT_ALONE:
        if isinstance(module, kind):
            slots.trouble.update(dict.fromkeys(roots, f"{name} {why}"))
    if size == 0:
        return
    start = slots.add(axis, size, module, dim)
    mapped = [channel for channel in channels if channel.root_idx is not None and 0 <= channel.idx < size]
    if len(mapped) < len(channels):
        slots.trouble.update(dict.fromkeys(roots, f"there is no one-to-one map of its channels to those of {name}"))
    for channel in mapped:
        slots.reached.add(start + channel.idx)
        if axis[1] == "in" and isinstance(module, nn.Linear):
            slots.read(axis, channel.idx, by=root_start + channel.root_idx)
        else:
            slots.tie(root_start + channel.root_idx, start + channel.idx)


_BOTH: Side = "both"


def _collect(slots: Slots, seen: Observation, ignore: Collection[str]) -> tuple[list[Group], dict[str, str]]:
    """Units with the same members make a group."""
    reasons = slots.reasons()
    alike: dict[Any, list[dict[Axis, list[int]]]] = {}
    for representative, unit in slots.units().items():
        shape = frozenset((axis, len(channels)) for axis, channels in unit.items())
        alike.setdefault((shape, reasons.get(representative)), []).append(unit)
    groups: list[Group] = []
    skipped: dict[str, str] = {}
    taken: dict[str, int] = {}

    def position(item: tuple[Any, list[dict[Axis, list[int]]]]) -> tuple[int, list[int]]:
        axis = _producers(slots, seen, item[1][0])[:1]
        return (seen.order[slots.owner[axis[0]][0]], item[1][0][axis[0]]) if axis else (len(seen.order), [])

    for (_, reason), units in sorted(alike.items(), key=position):
        producers = _producers(slots, seen, units[0])
        if not producers:
            continue
        count = taken[producers[0][0]] = taken.get(producers[0][0], -1) + 1
        name = producers[0][0] + (f"[{count}]" if count else "")
        group = _group(name, slots, seen, units)
        why = reason or _whole(group, ignore)
        if why is None:
            groups.append(group)
        else:
            skipped[name] = why
    return groups, skipped


def _producers(slots: Slots, seen: Observation, unit: dict[Axis, list[int]]) -> list[Axis]:
    return sorted((axis for axis in unit if axis[1] == "out"), key=lambda axis: seen.order[slots.owner[axis][0]])


def _group(name: str, slots: Slots, seen: Observation, units: list[dict[Axis, list[int]]]) -> Group:
    by_side: dict[Side, list[Member]] = {"out": [], "both": [], "in": []}
    for axis in sorted(units[0], key=lambda axis: (seen.order.get(slots.owner[axis][0], len(seen.order)), axis)):
        module, dim = slots.owner[axis]
        index = torch.tensor([unit[axis] for unit in units], dtype=torch.long)
        by_side[axis[1]].append(Member(axis[0], module, axis[1], index, dim, seen.sources.get(module)))
    return Group(name, len(units), False, tuple(by_side["out"]), tuple(by_side["both"]), tuple(by_side["in"]))


def _whole(group: Group, ignore: Collection[str]) -> str | None:
    """Why a group must stay whole although its layers could be cut."""
    kept = [member.name for member in group.producers + group.carriers if member.name in ignore]
    if kept:
        return f"{', '.join(kept)} is named in ignore"
    if not group.consumers:
        return "no layer was seen to read its channels"
    if group.size < 2:
        width = group.producers[0].index.numel()
        return f"its {width} channels are all tied together (by groups of a convolution or norm), so none can go alone"
    return None
