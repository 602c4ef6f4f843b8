"""Forwards of a network over many batches at once, which stop at every layer, so that it can change before it acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from rlsprune.graph.sites import DROPOUTS, Site, add_as, is_sum, keeps_rows, layer_names
from rlsprune.model.calls import ExampleInputs, as_call, explained_run
from rlsprune.model.lanes import Lane
from rlsprune.model.product import Product, product_of

__all__ = ["Replay", "Stop"]


@dataclass(frozen=True, eq=False)
class Stop:
    """A stop of a forward: at a call of a layer, or at the sum that its output goes into."""

    site: Site
    product: Product
    """The call."""
    output: Tensor | None = None
    """The layer's output, if the call was made."""
    result: Tensor | None = None
    """The result after batch norms and the sum, if they were computed."""
    other: Tensor | None = None
    """The other summand."""
    padding: Tensor | None = None
    """The call's ``attention_mask``, which is zero for padding tokens."""

    def places(self) -> Tensor | None:
        """Returns the places of the output that count; None for all."""
        counted = self.product.counted(self.padding)
        return None if counted is None else counted.nonzero().flatten().cpu()


class Replay:
    """The forwards of one network over several batches, in step.

    Args:
        model: The network, in evaluation mode.
        sites: Sites at which to stop, from `rlsprune.graph.sites`.
        batches: Inputs of the network.
        ahead: Whether a forward stops before the layer acts. Its weights may then be changed, and it acts with the new
            ones. If not, the forward stops after the layer has acted, and its output is known.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[tuple[str, int], Site], batches: Sequence[ExampleInputs], ahead: bool
    ) -> None:
        self._model, self._sites, self._batches, self._ahead = model, sites, batches, ahead
        self._names = layer_names(model)
        self._watches: list[_Forward] = []
        self._stops = 0

    def advance(self, lanes: int) -> list[Stop]:
        """Advances the first ``lanes`` forwards to their next stop, and returns the stops; none at the end.

        Forwards that have not started yet start here, and pass all earlier stops.

        Raises:
            ValueError: The forwards do not call the same layers in the same order.
        """
        while len(self._watches) < lanes:
            self._watches.append(_Forward(self, self._batches[len(self._watches)], skip=self._stops))
        stops = [watch.lane.advance() for watch in self._watches]
        self._stops += 1
        found = [stop for stop in stops if stop is not None]
        if (found and {stop.site.key for stop in found} != {found[0].site.key}) or 0 < len(found) < len(stops):
            names = sorted({stop.site.layer for stop in found})
            raise ValueError(
                f"the network calls different layers for different inputs (here {', '.join(names)}): every batch must "
                "call the same layers in the same order"
            )
        return found

    def close(self) -> None:
        """Ends all forwards at their present stops."""
        for watch in self._watches:
            watch.lane.close()


@contextmanager
def closing(*replays: Replay) -> Iterator[None]:
    """Closes the replays at the end, also after an error."""
    try:
        yield
    finally:
        for replay in replays:
            replay.close()


class _Forward(TorchFunctionMode):
    """One forward, which sees every function that the network calls."""

    def __init__(self, replay: Replay, batch: ExampleInputs, skip: int) -> None:
        super().__init__()
        self._sites, self._names, self._ahead = replay._sites, replay._names, replay._ahead
        self._model, self._batch, self._skip = replay._model, batch, skip
        self._device = next(self._model.parameters()).device.type
        self._calls: Counter[str] = Counter()
        self._open: dict[int, tuple[Tensor, _Pending]] = {}
        """id of a tensor on its way from a layer to a sum → the tensor, and its layer's pending call."""
        self.lane: Lane[Stop] = Lane(self._forward)

    def _forward(self, lane: Lane[Stop]) -> None:
        args, kwargs = as_call(self._batch)
        with torch.no_grad(), explained_run(args, kwargs, "a batch"), self:
            self._model(*args, **kwargs)

    def _stop(self, stop: Stop) -> None:
        if self._skip:
            self._skip -= 1
            return
        mask = self._batch.get("attention_mask") if isinstance(self._batch, Mapping) else None
        self.lane.hand_out(replace(stop, padding=mask if isinstance(mask, Tensor) else None))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # reads an attribute and computes nothing
            return func(*args, **kwargs)
        product = product_of(func, args, kwargs)
        if product is not None and id(product.weight) in self._names:
            return self._layer(product, lambda: self._run(func, args, kwargs))
        if self._open:
            tracked = [self._open[id(value)] for value in args if isinstance(value, Tensor) and id(value) in self._open]
            if tracked and is_sum(func, args, kwargs):
                return self._sum(func, args, kwargs, *tracked[0])
            if tracked and args[0] is tracked[0][0]:
                return self._carry(func, args, kwargs, tracked[0][1])
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The errand runs in another thread, which has not entered the autocast of the forward.
        enabled, dtype = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

        def errand() -> Any:
            with torch.no_grad(), torch.autocast(self._device, dtype, enabled=enabled):
                return func(*args, **kwargs)

        return self.lane.outside(errand)

    def _layer(self, product: Product, call: Callable[[], Tensor]) -> Tensor:
        name = self._names[id(product.weight)]
        site = self._sites.get((name, self._calls[name]))
        self._calls[name] += 1
        if site is None:
            return call()
        if site.sums:
            output = call()
            self._open[id(output)] = (output, _Pending(site, product, output, [call]))
            return output
        if self._ahead:
            self._stop(Stop(site, product))
            return call()
        output = call()
        self._stop(Stop(site, product, output, output))
        return output

    def _carry(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pending: _Pending) -> Any:
        """Runs a function between layer and sum, and tracks its result if it is a batch norm, dropout or reshape."""
        result = self._run(func, args, kwargs)
        carries = func is F.batch_norm or func in DROPOUTS or keeps_rows(func, args, result)
        if isinstance(result, Tensor) and (carries or result is args[0]):
            pending.calls.append(lambda value: self._run(func, (value, *args[1:]), kwargs))
            self._open[id(result)] = (result, pending)
        return result

    def _sum(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, pending: _Pending
    ) -> Tensor:
        first = args[0] is tensor
        other = args[1] if first else args[0]
        self._open = {key: entry for key, entry in self._open.items() if entry[1] is not pending}
        site, product = pending.site, pending.product
        if not self._ahead:
            result: Tensor = self._run(torch.add, (tensor, other), {})
            self._stop(Stop(site, product, pending.output, result, other))
            return add_as(func, args[0], result)
        skipped = self._skip > 0
        self._stop(Stop(site, product, other=other))
        if not skipped:
            tensor = pending.calls[0]()
            for call in pending.calls[1:]:
                tensor = call(tensor)
        return add_as(func, args[0], self._run(torch.add, (tensor, other), {}))


@dataclass(eq=False)
class _Pending:
    """A layer that acted before its sum was known."""

    site: Site
    product: Product
    output: Tensor
    calls: list[Callable[..., Tensor]]
    """The layer's call and those of the functions behind it, to be repeated."""
