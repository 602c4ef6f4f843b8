"""Finds the groups of channels that can be removed from a network, given an example of its input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlsprune.graph.attention import find_attention
from rlsprune.graph.flow import follow_channels
from rlsprune.graph.groups import ChannelGraph, Group
from rlsprune.graph.labelling import Labelling
from rlsprune.graph.layers import unprunable
from rlsprune.graph.members import Member
from rlsprune.graph.observe import Call, Observation, RawInput, observe
from rlsprune.graph.readers import uncalled_in_homes
from rlsprune.graph.settle import settle_attention
from rlsprune.graph.trace import trace_groups
from rlsprune.graph.trial import CutTrial
from rlsprune.graph.verify import verify_groups
from rlsprune.graph.watch import LayerWatch
from rlsprune.model.arguments import check_iterable, shown
from rlsprune.model.attention import open_attention, opened
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.demands import check_inputs, check_network
from rlsprune.model.fitted import fit_views
from rlsprune.model.interrupts import uninterrupted
from rlsprune.model.modes import plain_attention, preserved


def find_groups(model: nn.Module, example_inputs: ExampleInputs, ignore: Iterable[str] = ()) -> ChannelGraph:
    """Finds which channels of a network must go together, and verifies by experiment that they can go.

    The network runs a few times in evaluation mode and is left exactly as it was.

    Args:
        model: The network itself, not a parallel or compiled wrapper of it.
        example_inputs: Inputs of a call: a tensor, a tuple of arguments or a dict of keyword arguments.
        ignore: Names of modules that keep all the channels they make (a container's name: all modules in it), or
            ``input`` to keep the input features.

    Raises:
        ValueError: if the model is wrapped, cannot run on the inputs, or ignore names no module.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [(group.name, group.size) for group in find_groups(model, torch.randn(1, 4))]
        [('input', 4), ('0', 8)]
    """
    check_network(model)
    _refuse_wrappers(model)
    check_inputs(example_inputs)
    ignored = _expand(model, ignore)
    call = Call.of(example_inputs)
    with uninterrupted(), preserved(model), plain_attention(), opened(model), LayerWatch(model) as watch:
        call, labelling, seen = _run(model, call)
        inputs, raw = _input_groups(model, seen, ignored)
        trial = CutTrial(model, call, watch)
        heads, headless = _attention(model, call, labelling, seen, ignored, trial)
        drafts, skipped = _beside(heads, *trace_groups(labelling, seen, ignored))
        found = [*inputs, *_in_order([*heads, *drafts], labelling.order)]
        groups, failed = verify_groups(trial, found, labelling.order)
    uncalled = uncalled_in_homes(groups, trial.uncalled, model.get_submodule)
    return ChannelGraph(groups, {**raw, **skipped, **headless, **failed}, uncalled)


def open_attention_of(graph: ChannelGraph) -> None:
    """Opens every attention whose heads can go and whose output projection is not called, so that it is."""
    for member in (member for group in graph for member in group.producers):
        if isinstance(member.module, nn.MultiheadAttention):
            open_attention(member.module)
    for module, layers in graph.uncalled.items():
        fit_views(module, layers)


def _attention(
    model: nn.Module, call: Call, labelling: Labelling, seen: Observation, ignored: set[str], trial: CutTrial
) -> tuple[list[Group], dict[str, str]]:
    """Returns the groups of every attention, if there is any, and name → reason of what cannot go from them."""
    if not labelling.multiplies:
        return [], {}
    candidates, unattended = find_attention(model, follow_channels(model, call), seen, labelling.order, ignored)
    heads, headless = settle_attention(candidates, trial)
    return heads, {**unattended, **headless}


def _beside(
    heads: Sequence[Group], drafts: Sequence[Group], skipped: Mapping[str, str]
) -> tuple[list[Group], dict[str, str]]:
    """Returns the groups, and the reasons to leave layers alone, of what is no part of a head."""
    taken = {member.axis for group in heads for member in group.producers + group.carriers}
    left = [
        replace(group, fitted=_homes_behind(group, heads))
        for group in drafts
        if taken.isdisjoint(member.axis for member in group.producers + group.carriers)
    ]
    names = {name for name, _ in taken}
    return left, {name: why for name, why in skipped.items() if name.partition("[")[0] not in names}


def _homes_behind(group: Group, heads: Sequence[Group]) -> tuple[str, ...]:
    """Returns the fitted modules of attentions that read these channels: the width of their input shrinks too."""
    read = {member.name for member in group.consumers}
    attentions = [head.attention for head in heads if head.attention is not None and head.attention.fitted is not None]
    return tuple(sorted({str(one.fitted) for one in attentions if read & {member.name for member in one.members}}))


def _in_order(groups: Sequence[Group], order: Mapping[nn.Module, int]) -> list[Group]:
    """Sorts groups in the order in which the network runs."""
    return sorted(groups, key=lambda group: order.get(group.producers[0].module, len(order)))


def _run(model: nn.Module, call: Call) -> tuple[Call, Labelling, Observation]:
    """Runs the network once, on the first two of a batch of many if that works, and sees where channels go."""
    for example in (call.of_few(), call):
        labelling = Labelling(model)
        try:
            seen, output = observe(model, example, labelling.following(model))
        except ValueError:
            if example is call:
                raise
            continue
        labelling.finish(output)
        return example, labelling, seen
    raise AssertionError


def _refuse_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name!r} of the model" if name else "the model"
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) or kind.startswith("FullySharded"):
            raise ValueError(f"{where} is wrapped in {kind}: pass the inner module (.module), and wrap it again after")
        if hasattr(module, "_orig_mod"):
            raise ValueError(f"{where} is compiled ({kind}): pass the inner module (._orig_mod)")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is a {kind}, whose layers cannot change: pass the module it was made from")
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not parameter.numel():
                raise ValueError(f"{own} of {where} has no entry (shape {tuple(parameter.shape)}): leave the layer out")


def module_names(ignore: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in ``ignore``.

    Raises:
        ValueError: ``ignore`` is a single name.
        TypeError: It holds something other than names.
    """
    if isinstance(ignore, str):
        raise ValueError(f"ignore must be a collection of module names, got the string {ignore!r}: write [{ignore!r}]")
    check_iterable("ignore", ignore, "give the names of modules")
    names = tuple(ignore)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"ignore holds {shown(name)}: give the names of modules")
    return names


def _expand(model: nn.Module, ignore: Iterable[str]) -> set[str]:
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for wanted in module_names(ignore):
        if wanted not in names and wanted != "input":
            close = difflib.get_close_matches(wanted, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see model.named_modules()"
            raise ValueError(f"ignore names {wanted!r}, which is no module of the model: {hint}")
        found |= {wanted, *(name for name in names if name.startswith(f"{wanted}."))}
    return found


def _input_groups(model: nn.Module, seen: Observation, ignore: set[str]) -> tuple[list[Group], dict[str, str]]:
    """Makes a group for each input tensor whose features only linear layers read; gives reasons for the others."""
    names = {module: name for name, module in model.named_modules()}
    groups: list[Group] = []
    skipped: dict[str, str] = {}
    for name, raw in seen.inputs.items():
        if not raw.readers:
            # An image, say, that a convolution reads: nothing that could have been pruned.
            continue
        why = "it is named in ignore" if {name, "input"} & ignore else _keep_input(raw, seen, names)
        if why is None:
            readers = list(dict.fromkeys(raw.readers))
            index = torch.arange(readers[0].in_features).unsqueeze(1)
            consumers = tuple(Member(names[reader], reader, "in", index) for reader in readers)
            groups.append(Group(name, len(index), True, (), (), consumers))
        else:
            skipped[name] = why
    return groups, skipped


def _keep_input(raw: RawInput, seen: Observation, names: dict[nn.Module, str]) -> str | None:
    if raw.others:
        return f"besides linear layers, {', '.join(dict.fromkeys(raw.others))} reads the network's input"
    widths = {names[reader]: reader.in_features for reader in raw.readers}
    if len(set(widths.values())) > 1:
        return f"layers read it with different numbers of features: {widths}"
    if max(widths.values()) < 2:
        return "it has a single feature"
    for reader in raw.readers:
        why = unprunable(reader)
        if why is not None:
            return f"{names[reader]} cannot be cut: {why}"
        if seen.calls[reader] != raw.readers.count(reader):
            return f"{names[reader]} reads other things too"
        sharing = [name for module, name in names.items() if module is not reader and _has(module, reader.weight)]
        if sharing:
            return f"{names[reader]} shares its weight with {sharing[0]}"
    return None


def _has(module: nn.Module, parameter: Tensor) -> bool:
    return any(own is parameter for own in module._parameters.values())
