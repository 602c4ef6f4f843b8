"""The cost of a model: parameters, weights, FLOPs, latency and memory of one inference, measured.

All of it is measured on a copy in `eval()` without gradients and without this package's training hooks: the model, its
mode, its buffers and the random number generators stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.counts import count, weight_count
from rlsprune.model.latency import latencies, median_and_iqr, ratio, ratio_quartiles
from rlsprune.model.memory import peak_bytes

__all__ = ["Profile", "ProfileRatio", "profile"]


@dataclass(frozen=True)
class Profile:
    """The costs of one inference on the example inputs. `before / after` gives their ratios; `str()` is a table."""

    params: int
    """Elements of all parameters, each tensor once."""
    weights: int
    """The weights of linear, convolution, recurrent, attention and embedding layers: no biases, no scales."""
    flops: int
    """FLOPs of matrix products, convolutions, recurrent layers and attention, as `torch.utils.flop_counter` counts
    them; a multiply-add counts as 2."""
    latency_ms: float
    """The median time."""
    latency_iqr_ms: float
    """The interquartile range of the times."""
    peak_bytes: int
    """Parameters, buffers and the most that results of operations took at one time. On CUDA its allocator reports it;
    elsewhere the tensors alive are counted, without what a kernel allocates and frees itself. Inputs do not count."""
    before: Profile | None = field(default=None, repr=False, compare=False)
    """An earlier profile, shown beside this one."""
    rounds_ms: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """The times behind the median. Those of two models that were measured in turns belong together, round by round."""

    def __truediv__(self, after: Profile) -> ProfileRatio:
        if not isinstance(after, Profile):
            return NotImplemented
        return ProfileRatio(self, after)

    def __str__(self) -> str:
        if self.before is not None:
            return str(self.before / self)
        return _table([["", "value"], *([label, text] for label, text in _rows(self))])


@dataclass(frozen=True)
class ProfileRatio:
    """The factors by which the costs fell: the quotients of two profiles. `str()` is a table with both."""

    before: Profile
    after: Profile

    @property
    def params(self) -> float:
        """Returns the ratio of the parameters."""
        return ratio(self.before.params, self.after.params)

    @property
    def weights(self) -> float:
        """Returns the ratio of the weights."""
        return ratio(self.before.weights, self.after.weights)

    @property
    def flops(self) -> float:
        """Returns the ratio of the FLOPs."""
        return ratio(self.before.flops, self.after.flops)

    @property
    def latency(self) -> float:
        """Returns the ratio of the latencies: the median over rounds measured in turns, else that of the medians."""
        rounds = self._latency_ratios()
        return ratio(self.before.latency_ms, self.after.latency_ms) if rounds is None else rounds[1]

    @property
    def latency_quartiles(self) -> tuple[float, float] | None:
        """Returns quartiles of the ratio over the rounds; None unless both models were measured in turns."""
        rounds = self._latency_ratios()
        return None if rounds is None else (rounds[0], rounds[2])

    def _latency_ratios(self) -> tuple[float, float, float] | None:
        """Returns quartiles and median of the ratio, round by round."""
        before, after = self.before.rounds_ms, self.after.rounds_ms
        if self.after.before is not self.before or len(before) != len(after) or len(after) < 2:
            return None
        return ratio_quartiles(before, after)

    @property
    def peak(self) -> float:
        """Returns the ratio of the peak memory."""
        return ratio(self.before.peak_bytes, self.after.peak_bytes)

    def __str__(self) -> str:
        ratios = [f"{times:.2f}×" for times in (self.params, self.weights, self.flops, self.latency, self.peak)]
        if self.latency_quartiles is not None:
            ratios[3] += " ({:.2f}–{:.2f})".format(*self.latency_quartiles)
        rows = [
            [label, old, new, times]
            for (label, old), (_, new), times in zip(_rows(self.before), _rows(self.after), ratios, strict=True)
        ]
        return _table([["", "before", "after", "before / after"], *rows])


def profile(
    model: nn.Module,
    example_inputs: ExampleInputs,
    before: Profile | nn.Module | tuple[nn.Module, ExampleInputs] | None = None,
    *,
    min_seconds: float = 0.2,
) -> Profile:
    """Measures the cost of one inference on the example inputs.

    Args:
        model: The model, on any device.
        example_inputs: A tensor, a tuple of arguments or a dict of keyword arguments, on the model's device. Its
            batch size is that of the measurement.
        before: The unpruned model, measured in turns with this one, so that other work on the machine slows both
            alike; a pair of it and its inputs if it takes others (see `strip_inputs`); or an earlier profile.
        min_seconds: Least time for which the inference is repeated to measure its latency.

    Examples:
        >>> import torch
        >>> whole, half = torch.nn.Linear(100, 100), torch.nn.Linear(100, 50)
        >>> costs = profile(half, torch.randn(8, 100), before=whole)
        >>> (costs.before / costs).flops
        2.0
    """
    check_argument("min_seconds", min_seconds, lambda seconds: 0 <= seconds < float("inf"), "a number ≥ 0")
    if isinstance(before, nn.Module):
        before = before, example_inputs
    if before is None or isinstance(before, Profile):
        (times,) = latencies([(model, example_inputs)], min_seconds=min_seconds)
        return _profile(model, example_inputs, times, before)
    if not (isinstance(before, tuple) and len(before) == 2 and isinstance(before[0], nn.Module)):
        kind = type(before).__name__
        raise TypeError(f"before is a {kind}: give the model as it was, that model and its inputs, or its Profile")
    then, now = latencies([before, (model, example_inputs)], min_seconds=min_seconds)
    return _profile(model, example_inputs, now, _profile(*before, then))


def _profile(
    model: nn.Module, example_inputs: ExampleInputs, times: list[float], before: Profile | None = None
) -> Profile:
    params, flops = count(model, example_inputs)
    median, iqr = median_and_iqr(times)
    return Profile(
        params=params,
        weights=weight_count(model),
        flops=flops,
        latency_ms=median,
        latency_iqr_ms=iqr,
        peak_bytes=peak_bytes(model, example_inputs),
        before=before,
        rounds_ms=tuple(times),
    )


def _rows(costs: Profile) -> list[tuple[str, str]]:
    return [
        ("parameters", f"{costs.params:,}"),
        ("weights", f"{costs.weights:,}"),
        ("FLOPs", f"{costs.flops:,}"),
        ("latency (ms)", f"{costs.latency_ms:.3f} ± {costs.latency_iqr_ms:.3f}"),
        ("peak memory (bytes)", f"{costs.peak_bytes:,}"),
    ]


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
