"""What a model costs: parameters, weights, FLOPs, latency and memory of one inference, measured.

All of it is measured on a copy in `eval()` without gradients and without this package's training hooks: the model, its
mode, its buffers and the random number generators stay as they are.
"""

from __future__ import annotations

import statistics
import weakref
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

from rlsprune.model.calls import ExampleInputs, device_of, unwrap
from rlsprune.model.modes import inference, plain_attention

__all__ = [
    "Profile",
    "ProfileRatio",
    "count",
    "flops_per_weight",
    "latency",
    "parameter_count",
    "profile",
    "weight_count",
]

_MIN_TIMES = 5  # measurements behind a median, however slow the model


@dataclass(frozen=True)
class Profile:
    """The costs of one inference on the example inputs. `before / after` gives their ratios; `str()` is a table."""

    params: int
    """Elements of all parameters, each tensor once."""
    weights: int
    """Of these, the weights of linear and convolution layers: no biases, no scales of norms, no embeddings."""
    flops: int
    """As `torch.utils.flop_counter` counts matrix products, convolutions and attention; a multiply-add counts as 2."""
    latency_ms: float
    """The median time."""
    latency_iqr_ms: float
    """The interquartile range of the times."""
    peak_bytes: int
    """Parameters, buffers and the most that results of operations took at one time. On CUDA as its allocator reports;
    elsewhere from the tensors alive, without what a kernel takes and frees within itself. Inputs are not counted."""
    before: Profile | None = field(default=None, repr=False, compare=False)
    """An earlier profile, shown beside this one."""

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
    def peak(self) -> float:
        """The ratio of the peak memory."""
        return _ratio(self.before.peak_bytes, self.after.peak_bytes)

    def __str__(self) -> str:
        ratios = (self.params, self.weights, self.flops, self.latency, self.peak)
        rows = [
            [label, old, new, f"{ratio:.2f}×"]
            for (label, old), (_, new), ratio in zip(_rows(self.before), _rows(self.after), ratios, strict=True)
        ]
        return _table([["", "before", "after", "before / after"], *rows])


def profile(
    model: nn.Module,
    example_inputs: ExampleInputs,
    before: Profile | None = None,
    *,
    min_seconds: float = 0.2,
) -> Profile:
    """Measures what one inference on the example inputs costs.

    Args:
        model: On any device.
        example_inputs: A tensor, a tuple of arguments or a dict of keyword arguments, on the model's device. Its
            batch size is that of the measurement.
        before: An earlier profile to show beside this one, such as that of the unpruned model.
        min_seconds: How long to repeat the inference for its latency.

    Examples:
        >>> import torch
        >>> old = profile(torch.nn.Linear(100, 100), torch.randn(8, 100))
        >>> new = profile(torch.nn.Linear(100, 50), torch.randn(8, 100), before=old)
        >>> (old / new).flops
        2.0
    """
    if before is not None and not isinstance(before, Profile):
        raise TypeError(f"before is a {type(before).__name__}: give the Profile of the earlier model")
    params, flops = count(model, example_inputs)
    median, iqr = latency(model, example_inputs, min_seconds=min_seconds)
    return Profile(
        params=params,
        weights=weight_count(model),
        flops=flops,
        latency_ms=median,
        latency_iqr_ms=iqr,
        peak_bytes=_peak_bytes(model, example_inputs),
        before=before,
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
            rates[name] = flops // module.weight.numel()
            total += rates[name] * module.weight.numel()
    return rates if total == sum(counts["Global"].values()) else None


def _flops(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, dict[Any, int]]:
    """FLOPs by module and operation, from one run; ``"Global"`` has them all."""
    counter = FlopCounterMode(display=False)
    # The counter does not know the CPU's fused attention; the products that it is made of cost the same.
    products = sdpa_kernel(SDPBackend.MATH)
    with inference(model, example_inputs) as (plain, args, kwargs), plain_attention(), products, counter:
        plain(*args, **kwargs)
    return {"Global": {}, **counter.get_flop_counts()}


def parameter_count(model: nn.Module) -> int:
    """The elements of all parameters; a tensor with several names counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_count(model: nn.Module) -> int:
    """The weights of the linear and convolution layers and of attention's projections, as the paper's tables count."""
    weights: dict[int, int] = {}
    for module in model.modules():
        names = ["weight"] if isinstance(module, nn.Linear | _ConvNd) else []
        if isinstance(module, nn.MultiheadAttention):
            names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        for name in names:
            weight = getattr(module, name)
            if weight is not None:
                owner = module._parameters.get(name)  # a parametrised weight is computed anew at each access
                weights[id(module) if owner is None else id(owner)] = weight.numel()
    return sum(weights.values())


def latency(model: nn.Module, example_inputs: ExampleInputs, *, min_seconds: float = 0.2) -> tuple[float, float]:
    """Median and interquartile range of the time of one inference, in milliseconds.

    Torch's own threads are used as they are set, and CUDA is waited for.
    """
    with inference(model, example_inputs) as (plain, args, kwargs):
        timer = Timer(
            "model(*args, **kwargs)",
            globals={"model": plain, "args": args, "kwargs": kwargs},
            num_threads=torch.get_num_threads(),
        )
        times = list(timer.blocked_autorange(min_run_time=min_seconds).times)
        while len(times) < _MIN_TIMES:
            times += timer.timeit(1).times
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median * 1e3, (high - low) * 1e3


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
