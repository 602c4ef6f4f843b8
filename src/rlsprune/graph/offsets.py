"""Functions that move channels by a constant: padding with channels of zeros, and slices of channels."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["ChannelOffset", "channel_offset"]


class ChannelOffset(NamedTuple):
    """What a function does to the numbers of channels."""

    shift: int
    """Added to the number of a channel."""
    inputs: range
    """Channels of its input that come out of it."""


def channel_offset(grad_fn: Any) -> ChannelOffset | None:
    """What the operation behind a node of autograd's graph does to the channels; None if they stay in their places.

    The channels lie in the second dimension, or in the only one beside the batch.
    """
    name = grad_fn.name() if grad_fn is not None else ""
    if name.startswith("ConstantPadNdBackward"):
        shape = grad_fn._input_metadata[0].shape  # of what the operation made
        pads = grad_fn._saved_pad
        place = 2 * (len(shape) - 2)  # the last dimension comes first, two numbers each
        if len(shape) < 2 or place + 1 >= len(pads):
            return None
        front, back = pads[place], pads[place + 1]
        if not front and not back:
            return None
        width = shape[1] - front - back
        return ChannelOffset(front, range(max(0, -front), min(width, width + back)))
    if name.startswith("SliceBackward"):
        shape = grad_fn._saved_self_sym_sizes
        if len(shape) < 2 or _signed(grad_fn._saved_dim) % len(shape) != 1 or grad_fn._saved_step != 1:
            return None
        start, stop, _ = slice(_signed(grad_fn._saved_start), _signed(grad_fn._saved_end)).indices(shape[1])
        return None if (start, stop) == (0, shape[1]) else ChannelOffset(-start, range(start, stop))
    return None


def _signed(number: int) -> int:
    """Autograd hands out a negative number as if it had no sign."""
    return number - 2**64 if number >= 2**63 else number
