"""Measures the multiple of channels that layers should keep if time counts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rlsprune.graph import Group, plan_cuts
from rlsprune.model.calls import ExampleInputs, bare_copy
from rlsprune.model.latency import latencies, ratio_quartiles
from rlsprune.prune.select import cut_size, most_to_go
from rlsprune.prune.surgery import apply_cuts

__all__ = ["free_multiple"]

_MULTIPLES = (16, 8, 4)
_SHARE = 0.3  # share of every layer that is cut on trial


def free_multiple(model: nn.Module, example_inputs: ExampleInputs, groups: Iterable[Group]) -> int:
    """Finds the largest multiple of channels that costs no time, although it keeps more channels than without rounding.

    Kernels work on blocks of channels: a layer of 48 may be faster than one of 45. Networks without three tenths of
    every layer are timed in turns, one with odd widths, the others rounded up to a multiple.

    Args:
        model: The network. Copies of it are cut.
        example_inputs: Inputs of the network.
        groups: The groups of channels that may go.
    """
    hidden = [group for group in groups if not group.is_input]

    def without_a_share(multiple: int) -> nn.Module:
        network = bare_copy(model).eval()
        going = {group: most_to_go(group.size, _going(group.size), 1, multiple) for group in hidden}
        apply_cuts(network, plan_cuts([(group, list(range(count))) for group, count in going.items() if count]))
        return network

    plain, *rounded = latencies([(without_a_share(multiple), example_inputs) for multiple in (1, *_MULTIPLES)])
    for multiple, times in zip(_MULTIPLES, rounded, strict=True):
        if ratio_quartiles(times, plain)[1] <= 1:
            return multiple
    return 1


def _going(size: int) -> int:
    """Returns about the share of a size, such that an odd number stays, which is no multiple of a power of two."""
    gone = cut_size(_SHARE, size)
    return gone + (size - gone + 1) % 2
