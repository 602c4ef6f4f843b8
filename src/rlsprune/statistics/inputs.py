"""Input statistics of a network's layers, gathered while it runs, with any optimizer or none."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlsprune.distributed.ranks import Ranks
from rlsprune.model.arguments import check_argument
from rlsprune.model.compiled import enlist, exporting, noticed
from rlsprune.model.demands import check_network
from rlsprune.model.tensors import forget_compiled_code, full_precision
from rlsprune.optim.entries import RANK, form_of, initial_entry, inverse_step
from rlsprune.optim.layers import Layer, mean_input
from rlsprune.optim.packing import InverseState
from rlsprune.statistics.inverse import DenseInverse, Inverse, from_rows, inverses_of
from rlsprune.statistics.rows import has_rows, sample_rows

# Rows drawn from one training batch.
_BATCH_ROWS = 128
# Bounds of the rows kept of a layer, which are twice its inputs. A layer with more inputs than the second number is
# solved in the space of its rows, at a cost of m²n, so it keeps only the first number.
_FEW_ROWS, _MANY_ROWS = 1024, 2048


def rows_kept(inputs: int) -> int:
    """Returns the number of rows kept of a layer with this many inputs, on all ranks together."""
    return _FEW_ROWS if inputs > _MANY_ROWS else min(max(2 * inputs, _FEW_ROWS), _MANY_ROWS)


class InputStatistics:
    """The inverse autocorrelation P of every layer's inputs, for networks trained with any optimizer.

    Statistics come from training forwards (``model.train()``, gradients enabled), or from any forward inside
    `everything`.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> statistics = rlsprune.InputStatistics(model)
        >>> _ = model(torch.rand(64, 4))
        >>> statistics.inverse("2").shape
        torch.Size([9, 9])
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "exact",
        *,
        mean_scale: float = 0.1,  # k
        p0: float = 1.0,
        damping: float = 1e-3,
        ranks: Ranks | None = None,
    ) -> None:
        """Registers one forward hook per Linear and Conv layer.

        Args:
            model: The network.
            kind: ``"exact"``: the inverse autocorrelation of the inputs themselves, from a bounded sample of the most
                recent rows (convolutions: patches), slightly damped. ``"training"``: the P that `rlsprune.RLS` would
                have, from the mean input of every batch.
            mean_scale: The paper's k, for kind ``"training"``.
            p0: P starts at p0·I, for kind ``"training"``.
            damping: Share of the mean of the autocorrelation's diagonal that is added to it, for kind ``"exact"``.
            ranks: Processes that each see a share of every batch, for kind ``"exact"``. The sample then covers all of
                them, and they must ask for it together.
        """
        check_argument("kind", kind, lambda name: name in ("exact", "training"), "'exact' or 'training'")
        for name, value in {"mean_scale": mean_scale, "p0": p0}.items():
            check_argument(name, value, lambda number: 0 < number < math.inf, "a number > 0")
        check_argument("damping", damping, lambda number: 0 <= number < math.inf, "a number ≥ 0")
        check_network(model, values=False)
        self._mean_scale, self._p0, self._damping, self._ranks = mean_scale, p0, damping, ranks
        self._everything = False
        self.active = True
        """Whether training forwards are watched at all."""
        collector = RowSample if kind == "exact" else _MeanInverse
        layers = {name: module for name, module in model.named_modules() if has_rows(module)}
        # Layers that share a weight share its statistics: what is done to the weight is done to all of them.
        # A weight that is computed from other parameters is a new tensor each time, and its layer's alone.
        owners = {name: id(layer._parameters.get("weight", layer)) for name, layer in layers.items()}
        shared = {owner: collector(self) for owner in owners.values()}
        self._collectors: dict[str, RowSample | _MeanInverse] = {name: shared[own] for name, own in owners.items()}
        self._handles = [
            layer.register_forward_hook(_Hook(self, name, layer), with_kwargs=True) for name, layer in layers.items()
        ]
        forget_compiled_code()

    def inverse(self, name: str) -> Tensor:
        """Returns P of the layer of that name, bias row last: n×n, or (groups, n, n) for a grouped convolution."""
        matrices = [_dense(P) for P in self.inverses(name)]
        return matrices[0] if len(matrices) == 1 else torch.stack(matrices)

    def inverses(self, name: str) -> list[Inverse]:
        """Returns P of each group of a layer, in the form that pruning works with.

        Raises:
            RuntimeError: No input of the layer was seen.
        """
        if name not in self._collectors:
            raise KeyError(f"no layer is called {name!r}; there are {', '.join(map(repr, self._collectors))}")
        return self._collectors[name].inverses(name)

    def clear(self, seed: int = 0) -> None:
        """Forgets everything seen; later samples depend only on the seed and the inputs."""
        for collector in self._collectors.values():
            collector.clear(seed)

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Counts evaluation forwards and forwards without gradients, too, inside the block."""
        before, self._everything = self._everything, True
        try:
            yield
        finally:
            self._everything = before

    def watches(self, module: nn.Module, compiled: bool = False) -> bool:
        """Whether a forward of the module counts now. In compiled code only forwards with gradients count."""
        return self._everything or (self.active and module.training and (compiled or torch.is_grad_enabled()))

    def close(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def observe(self, name: str, layer: Layer, inputs: Tensor, compiled: bool = False) -> None:
        """Adds the input of a layer after its forward. Compiled code calls it only where gradients are enabled."""
        if self.watches(layer, compiled):
            with torch.no_grad(), full_precision(inputs.device):
                self._collectors[name].add(layer, inputs.detach(), _MANY_ROWS if self._everything else _BATCH_ROWS)


class RowSample:
    """The most recent rows of one layer's input, at most a bounded number."""

    def __init__(self, owner: InputStatistics) -> None:
        self._damping, self._ranks = owner._damping, owner._ranks
        self.clear(0)

    def clear(self, seed: int) -> None:
        """Drops the rows and restarts the draw."""
        self._generator = torch.Generator().manual_seed(seed)
        self._batches: deque[tuple[Tensor, int]] = deque()
        """Rows of each batch, and the number drawn on all ranks together."""

    def add(self, layer: Layer, inputs: Tensor, count: int) -> None:
        """Draws at most ``count`` rows from a batch, and drops the oldest ones that are not needed any more."""
        rank, ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        rows, drawn = sample_rows(layer, inputs, count, self._generator, rank, ranks)
        n = rows.shape[2]
        if layer.bias is not None:
            rows = nn.functional.pad(rows, (0, 1), value=1.0)
        if self._batches and self._batches[0][0].shape[::2] != rows.shape[::2]:
            self._batches.clear()  # the layer was resized
        self._batches.append((rows, drawn))
        limit = rows_kept(n)
        while sum(drawn for _, drawn in self._batches) - self._batches[0][1] >= limit:
            self._batches.popleft()

    def inverses(self, name: str) -> list[Inverse]:
        """Computes P of each group from the rows sampled so far."""
        rows = torch.cat([rows for rows, _ in self._batches], dim=1) if self._batches else None
        if self._ranks is not None:
            rows = self._ranks.gather_rows(rows, dim=1)
        if rows is None or not rows.shape[1]:
            raise RuntimeError(
                f"no input of layer {name!r} was seen (forwards in eval() or without gradients do not count): train a "
                "step with the statistics in place, or give them batches (pruner.calibrate(batches))"
            )
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if not bool(rows.sum().isfinite()):
            raise FloatingPointError(f"the input of layer {name!r} is not finite: check the data and the loss")
        return [from_rows(group, self._damping) for group in rows]


class _MeanInverse:
    """P of mean inputs, Eqs. (16) to (20) without the training, in factors where RLS keeps it so."""

    def __init__(self, owner: InputStatistics) -> None:
        self._mean_scale, self._p0 = owner._mean_scale, owner._p0
        self.clear(0)

    def clear(self, seed: int) -> None:
        self._entry: InverseState | None = None

    def add(self, layer: Layer, inputs: Tensor, count: int) -> None:
        x, _ = mean_input(layer, inputs, torch.promote_types(layer.weight.dtype, torch.float32))
        if self._entry is None or form_of(self._entry).like.shape[::2] != x.shape:
            self._entry = initial_entry(x, self._p0, RANK)
        step = inverse_step([[self._entry]])
        step.look([x], self._mean_scale)
        step.update_(1.0, self._p0, None)

    def inverses(self, name: str) -> list[Inverse]:
        if self._entry is None:
            raise RuntimeError(f"no input of layer {name!r} was seen: run a batch with the statistics in place")
        return inverses_of(form_of(self._entry))


class _Hook:
    """Hands a layer's input to the statistics, which it holds weakly; copied or pickled, it is idle."""

    def __init__(self, statistics: InputStatistics | None, name: str, layer: Layer | None = None) -> None:
        self._statistics = None if statistics is None else weakref.ref(statistics)
        self._name = name
        self._number = None if layer is None else enlist(self, layer)
        self._mark = None if layer is None else torch.zeros((), device=next(layer.parameters()).device)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        return _Hook, (None, self._name)

    def __call__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if exporting():
            return
        inputs = args[0] if args else kwargs["input"]
        if not torch.compiler.is_compiling():
            statistics = None if self._statistics is None else self._statistics()
            if statistics is not None:
                statistics.observe(self._name, layer, inputs)
        elif self._number is not None and self._mark is not None and layer.training and torch.is_grad_enabled():
            noticed(inputs.detach(), self._mark, self._number)

    def told(self, layer: Layer, inputs: Tensor) -> None:
        """Records the input that compiled code has seen."""
        statistics = None if self._statistics is None else self._statistics()
        if statistics is not None:
            statistics.observe(self._name, layer, inputs, compiled=True)


def _dense(P: Inverse) -> Tensor:
    if isinstance(P, DenseInverse):
        return P.P
    everything = torch.arange(P.size).unsqueeze(0)
    return P.blocks(everything)[0]
