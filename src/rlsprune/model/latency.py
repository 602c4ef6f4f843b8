"""The time of one inference, measured in turns with other models."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from rlsprune.model.calls import ExampleInputs, explained_run
from rlsprune.model.modes import inference

__all__ = ["latencies", "latency", "median_and_iqr", "ratio", "ratio_quartiles"]

_MIN_TIMES = 5  # measurements behind a median, however slow the model
_ROUND_SECONDS = 5e-3  # length of a round, in which a small model runs many times


def latency(model: nn.Module, example_inputs: ExampleInputs, *, min_seconds: float = 0.2) -> tuple[float, float]:
    """Measures the median and interquartile range of the time of one inference, in milliseconds: see `latencies`."""
    return median_and_iqr(latencies([(model, example_inputs)], min_seconds=min_seconds)[0])


def latencies(calls: Sequence[tuple[nn.Module, ExampleInputs]], *, min_seconds: float = 0.2) -> list[list[float]]:
    """Measures times of one inference of each model, in milliseconds, in turns.

    Other work on the machine then slows all models alike, and the ratio of two of them holds. Torch's own threads are
    used as they are set. On CUDA the time ends when the work is done.

    Args:
        calls: Models, each with the inputs that it is called with, on its device.
        min_seconds: Least time for which each of them is measured.

    Returns:
        The times of each model, one per round.
    """
    times: list[list[float]] = [[] for _ in calls]
    with contextlib.ExitStack() as stack:
        timers, first = [], []
        for call in calls:
            model, args, kwargs = stack.enter_context(inference(*call))
            timers.append(_timer(model, args, kwargs))
            stack.enter_context(explained_run(args, kwargs))
            first.append(timers[-1].timeit(1).median)  # it warms up, and tells how many make a round
        runs = [max(1, round(_ROUND_SECONDS / max(seconds, 1e-9))) for seconds in first]
        spent = 0.0
        while spent < min_seconds * len(calls) or len(times[0]) < _MIN_TIMES:
            for own, timer, number in zip(times, timers, runs, strict=True):
                seconds = timer.timeit(number).median
                own.append(seconds * 1e3)
                spent += seconds * number
    return times


def ratio_quartiles(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Returns quartiles of the ratio of two models' times by round: `latencies` measures both under the same load."""
    ratios = [ratio(*pair) for pair in zip(before, after, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def _timer(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timer:
    return Timer(
        "model(*args, **kwargs)",
        globals={"model": model, "args": args, "kwargs": kwargs},
        num_threads=torch.get_num_threads(),
    )


def median_and_iqr(times: list[float]) -> tuple[float, float]:
    """Returns the median of times, and their interquartile range."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, high - low


def ratio(before: float, after: float) -> float:
    """Returns the factor by which a cost fell; 1 if both costs are 0."""
    if after:
        return before / after
    return float("inf") if before else 1.0
