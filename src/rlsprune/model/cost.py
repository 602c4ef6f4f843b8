"""What a model costs: parameters, weights, FLOPs, latency and memory of one inference, measured.

All of it is measured on a copy in `eval()` without gradients and without this package's training hooks: the model, its
mode, its buffers and the random number generators stay as they are.
"""

from __future__ import annotations

import contextlib
import statistics
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from rlsprune.model.calls import ExampleInputs, device_of, explained_run, unwrap
from rlsprune.model.modes import inference, plain_attention

__all__ = [
    "Profile",
    "ProfileRatio",
    "count",
    "flops_per_weight",
    "latencies",
    "latency",
    "parameter_count",
    "profile",
    "ratio_quartiles",
    "weight_count",
    "weight_names",
]

_MIN_TIMES = 5  # measurements behind a median, however slow the model
_ROUND_SECONDS = 5e-3  # in which a small model runs many times


@dataclass(frozen=True)
class Profile:
    """The costs of one inference on the example inputs. `before / after` gives their ratios; `str()` is a table."""

    params: int
    """Elements of all parameters, each tensor once."""
    weights: int
    """The weights of linear, convolution, recurrent, attention and embedding layers: no biases, no scales."""
    flops: int
    """As `torch.utils.flop_counter` counts matrix products, convolutions, recurrent layers and attention; a
    multiply-add counts as 2."""
    latency_ms: float
    """The median time."""
    latency_iqr_ms: float
    """The interquartile range of the times."""
    peak_bytes: int
    """Parameters, buffers and the most that results of operations took at one time. On CUDA as its allocator reports;
    elsewhere from the tensors alive, without what a kernel takes and frees within itself. Inputs are not counted."""
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
    """How many times each cost fell: the quotients of two profiles. `str()` is a table with both."""

    before: Profile
    after: Profile

    @property
    def params(self) -> float:
        """The ratio of the parameters."""
        return _ratio(self.before.params, self.after.params)

    @property
    def weights(self) -> float:
        """The ratio of the weights."""
        return _ratio(self.before.weights, self.after.weights)

    @property
    def flops(self) -> float:
        """The ratio of the FLOPs."""
        return _ratio(self.before.flops, self.after.flops)

    @property
    def latency(self) -> float:
        """The ratio of the median latencies."""
        return _ratio(self.before.latency_ms, self.after.latency_ms)

    @property
    def latency_quartiles(self) -> tuple[float, float] | None:
        """Quartiles of the ratio over the rounds; None unless both models were measured in turns."""
        before, after = self.before.rounds_ms, self.after.rounds_ms
        if self.after.before is not self.before or len(before) != len(after) or len(after) < 2:
            return None
        low, _, high = ratio_quartiles(before, after)
        return low, high

    @property
    def peak(self) -> float:
        """The ratio of the peak memory."""
        return _ratio(self.before.peak_bytes, self.after.peak_bytes)

    def __str__(self) -> str:
        ratios = [f"{ratio:.2f}×" for ratio in (self.params, self.weights, self.flops, self.latency, self.peak)]
        if self.latency_quartiles is not None:
            ratios[3] += " ({:.2f}–{:.2f})".format(*self.latency_quartiles)
        rows = [
            [label, old, new, ratio]
            for (label, old), (_, new), ratio in zip(_rows(self.before), _rows(self.after), ratios, strict=True)
        ]
        return _table([["", "before", "after", "before / after"], *rows])


def profile(
    model: nn.Module,
    example_inputs: ExampleInputs,
    before: Profile | nn.Module | tuple[nn.Module, ExampleInputs] | None = None,
    *,
    min_seconds: float = 0.2,
) -> Profile:
    """Measures what one inference on the example inputs costs.

    Args:
        model: On any device.
        example_inputs: A tensor, a tuple of arguments or a dict of keyword arguments, on the model's device. Its
            batch size is that of the measurement.
        before: The unpruned model, to be measured in turns with this one, so that other work on the machine slows both
            alike; a pair of it and its inputs if it takes others (see `strip_inputs`); or an earlier profile.
        min_seconds: How long to repeat the inference for its latency.

    Examples:
        >>> import torch
        >>> whole, half = torch.nn.Linear(100, 100), torch.nn.Linear(100, 50)
        >>> costs = profile(half, torch.randn(8, 100), before=whole)
        >>> (costs.before / costs).flops
        2.0
    """
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
    median, iqr = _median_and_iqr(times)
    return Profile(
        params=params,
        weights=weight_count(model),
        flops=flops,
        latency_ms=median,
        latency_iqr_ms=iqr,
        peak_bytes=_peak_bytes(model, example_inputs),
        before=before,
        rounds_ms=tuple(times),
    )


def count(model: nn.Module, example_inputs: ExampleInputs) -> tuple[int, int]:
    """Parameters and FLOPs, by one run of the model without timing. See `Profile` for what they count."""
    return parameter_count(model), sum(_flops(model, example_inputs)["Global"].values())


def flops_per_weight(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, int] | None:
    """How many FLOPs each weight of a linear or convolution layer takes, by the layer's name.

    The FLOPs of these layers are proportional to their weights, so this tells what the model costs when it has lost
    some of its channels. None if other operations count too, or a layer is not a plain one.
    """
    counts = _flops(model, example_inputs)
    root = type(unwrap(model)).__name__
    rates: dict[str, int] = {}
    total = 0
    for name, module in unwrap(model).named_modules():
        flops = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        if isinstance(module, nn.Linear | _ConvNd) and flops:
            if module._parameters.get("weight") is None:
                return None  # it is computed from other parameters
            rates[name] = flops // module.weight.numel()
            total += rates[name] * module.weight.numel()
    return rates if total == sum(counts["Global"].values()) else None


def _flops(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, dict[Any, int]]:
    """FLOPs by module and operation, from one run; ``"Global"`` has them all."""
    counter = FlopCounterMode(display=False)
    with inference(model, example_inputs) as (plain, args, kwargs), _frozen(plain), _plain_products(), counter:
        plain(*args, **kwargs)
    return {"Global": {}, **counter.get_flop_counts()}


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Parameters that need no gradient: torch's counter cannot follow a view of one that does through a module."""
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
    """Attention and recurrent layers by the products that they are made of, which cost the same and are counted.

    The counter knows neither the fused attention of the CPU nor the LSTM of oneDNN and the recurrent layers of cuDNN.
    """
    with plain_attention(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        onednn = torch.backends.mkldnn.flags(enabled=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another setting, which is set again to what it is
            onednn.__enter__()
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                onednn.__exit__(None, None, None)


def parameter_count(model: nn.Module) -> int:
    """The elements of all parameters; a tensor with several names counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_count(model: nn.Module) -> int:
    """The weights of linear, convolution, recurrent and embedding layers and of attention's projections, each once."""
    weights: dict[int, int] = {}
    for module in model.modules():
        for name in weight_names(module):
            weight = getattr(module, name)
            if weight is not None:
                owner = module._parameters.get(name)  # a parametrised weight is computed anew at each access
                weights[id(module) if owner is None else id(owner)] = weight.numel()
    return sum(weights.values())


def weight_names(module: nn.Module) -> list[str]:
    """The names of a module's own weights: matrices, kernels and tables, no biases and no scales."""
    if isinstance(module, nn.Linear | _ConvNd | nn.Bilinear | nn.Embedding | nn.EmbeddingBag):
        return ["weight"]
    if isinstance(module, nn.MultiheadAttention):
        return ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [name for name in module._parameters if name.startswith("weight")]
    return []


def latency(model: nn.Module, example_inputs: ExampleInputs, *, min_seconds: float = 0.2) -> tuple[float, float]:
    """Median and interquartile range of the time of one inference, in milliseconds: see `latencies`."""
    return _median_and_iqr(latencies([(model, example_inputs)], min_seconds=min_seconds)[0])


def latencies(calls: Sequence[tuple[nn.Module, ExampleInputs]], *, min_seconds: float = 0.2) -> list[list[float]]:
    """Times of one inference of each model, in milliseconds, measured in turns.

    Other work on the machine then slows all models alike, and the ratio of two of them holds. Torch's own threads are
    used as they are set, and CUDA is waited for.

    Args:
        calls: The models, each with the inputs that it is called with, on its device.
        min_seconds: How long each of them is measured at least.

    Returns:
        For each model as many times as there were rounds.
    """
    times: list[list[float]] = [[] for _ in calls]
    with contextlib.ExitStack() as stack:
        timers, first = [], []
        for call in calls:
            model, args, kwargs = stack.enter_context(inference(*call))
            timers.append(_timer(model, args, kwargs))
            with explained_run(args, kwargs):
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
    """Quartiles of the ratio of two models' times, round by round: `latencies` measures both under the same load."""
    ratios = [_ratio(*pair) for pair in zip(before, after, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def _timer(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timer:
    return Timer(
        "model(*args, **kwargs)",
        globals={"model": model, "args": args, "kwargs": kwargs},
        num_threads=torch.get_num_threads(),
    )


def _median_and_iqr(times: list[float]) -> tuple[float, float]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, high - low


def _peak_bytes(model: nn.Module, example_inputs: ExampleInputs) -> int:
    tensors = [*unwrap(model).parameters(), *unwrap(model).buffers()]
    resident = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    with inference(model, example_inputs) as (plain, args, kwargs):
        device = device_of(plain, (args, kwargs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            plain(*args, **kwargs)
            torch.cuda.synchronize(device)
            working = torch.cuda.max_memory_allocated(device) - start
        else:
            present = [*plain.parameters(), *plain.buffers()]
            present += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            with _LiveBytes(present) as live:
                plain(*args, **kwargs)
            working = live.peak
    return sum(resident.values()) + working


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operations make until they are freed."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Held, so that no new storage can get the id of an old one.
        self._present = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in present)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._present or key in self._alive:
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self._bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


def _ratio(before: float, after: float) -> float:
    if after:
        return before / after
    return float("inf") if before else 1.0


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
