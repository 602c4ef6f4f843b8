"""In-place removal of channels: the same Parameter objects get smaller, and all that mirrors them is cut, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from rlsprune.distributed.ddp import rebuild
from rlsprune.distributed.fingerprint import fingerprint
from rlsprune.distributed.ranks import find_ranks
from rlsprune.graph import ChannelGraph, Group, find_groups, open_attention_of
from rlsprune.graph.build import module_names
from rlsprune.graph.cuts import Cuts, cut
from rlsprune.model.calls import ExampleInputs, measurable
from rlsprune.model.sharded import settle, sharded_modules
from rlsprune.model.sizes import is_experts, write_sizes
from rlsprune.model.tensors import replace_data
from rlsprune.optim.rls import RLS
from rlsprune.prune.snapshot import Snapshot

T = TypeVar("T")
_OUTPUTS = ("out_features", "out_channels", "nf")


class LiveNetwork:
    """A network in training and all that is cut with it: its optimizer's state, its copies, the graph of its channels.

    Args:
        model: The network, or its DistributedDataParallel wrapper, which is rebuilt after a cut.
        optimizer: The optimizer of its parameters.
        example_inputs: Inputs of the network.
        ignore: Names of layers that keep all their channels.

    Raises:
        ValueError: Nothing can be cut.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, example_inputs: ExampleInputs, ignore: Iterable[str] = ()
    ) -> None:
        self.ranks = optimizer.ranks if isinstance(optimizer, RLS) else find_ranks(model)
        """The processes that train the network together, or None."""
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.divided = bool(sharded_modules(self.model))
        """Whether ``fully_shard`` has divided it over processes."""
        self.optimizer, self.copies = optimizer, list[nn.Module]()
        self._example_inputs, self._ignore = example_inputs, module_names(ignore)
        self._graph: ChannelGraph | None = self._find_graph()
        self._parameters = dict(self.model.named_parameters())
        self._shapes = _shapes(self._parameters)

    @property
    def graph(self) -> ChannelGraph:
        """Returns the groups of channels that can go, as they are now."""
        if self._graph is None:
            self._graph = self._find_graph()
        return self._graph

    @property
    def models(self) -> list[nn.Module]:
        """Returns the network itself, and its copies without wrappers."""
        return [self.model, *map(inner, self.copies)]

    def cut(self, cuts: Cuts) -> None:
        """Carries out a plan on the network, the optimizer's state, the copies and the graph."""
        apply_cuts(self.model, cuts, self.optimizer, self.copies)
        if self.divided:
            settle(self.model)
        self.graph.shrink(cuts)

    def check_unchanged(self) -> None:
        """Raises if other code has replaced or resized layers, so that the graph no longer matches the network."""
        settle(self.model)
        remedy = "another pruner, or other code, has changed the network: make a new Pruner for it"
        modules = dict(self.model.named_modules())
        for member in (member for group in self.graph for member in group.members if member.dim is None):
            if modules.get(member.name) is not member.module:
                raise RuntimeError(f"{member.name!r} was replaced by another layer: {remedy}")
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        own = dict(self.model.named_parameters())
        for name, known in self._parameters.items():
            if id(known) in trained and own.get(name) is not known:
                raise RuntimeError(
                    f"{name!r} was replaced by another parameter, which the optimizer does not train: make a new "
                    "optimizer, and a new Pruner for both"
                )
        present = _shapes(own)
        for name in {**self._shapes, **present}:
            if present.get(name) != self._shapes.get(name):
                raise RuntimeError(
                    f"{name!r} has the shape {present.get(name)}, and had {self._shapes.get(name)} when this pruner "
                    f"last saw it: {remedy}"
                )

    def _present_shapes(self) -> dict[str, tuple[int, ...]]:
        return _shapes(dict(self.model.named_parameters()))

    def trace_again(self) -> None:
        """Forgets the graph and the shapes, as the network may have got another shape."""
        self._graph = None
        self._shapes = self._present_shapes()

    @contextmanager
    def traced_again(self) -> Iterator[None]:
        """Calls `trace_again`, and undoes that if an error occurs inside."""
        known = self._graph, self._shapes
        self.trace_again()
        try:
            yield
        except BaseException:
            self._graph, self._shapes = known
            raise

    def sizes(self) -> dict[str, int]:
        """Returns output channels or states of each layer, and the numbers of input features, heads and their parts."""
        sizes = {group.name: group.size for group in self.graph if group.is_input}
        parts: dict[str, list[Group]] = {}
        for group in self.graph:
            if group.attention is not None:
                parts.setdefault(group.producers[0].name, []).append(group)
        for name, module in self.model.named_modules():
            sizes |= {group.name: group.size for group in parts.get(name, ())}
            inner = {"hidden_size": isinstance(module, nn.RNNBase), "intermediate_dim": is_experts(module)}
            names = [name for name, fits in inner.items() if fits] or _OUTPUTS
            size = next((size for own in names if isinstance(size := getattr(module, own, None), int)), None)
            if size is not None:
                sizes[name] = size
        return sizes

    # --- as it was ----------------------------------------------------------------------------------------------------

    @contextmanager
    def undone_on_error(self) -> Iterator[Callable[[], None]]:
        """Restores everything if an error occurs inside. Yields a function that does the same when called."""
        graph, groups, snapshots = self.graph, self.graph.groups, self.snapshots(copy=False)

        def undo() -> None:
            for snapshot in snapshots:
                snapshot.restore()
            self._graph, graph.groups = graph, groups

        try:
            yield undo
        except BaseException:
            undo()
            raise
        finally:
            self._shapes = self._present_shapes()

    def snapshots(self, *, copy: bool = True) -> list[Snapshot]:
        """Returns snapshots of the network, with its optimizer, and of its copies; see `Snapshot` for ``copy``."""
        return [
            Snapshot(self.model, self.optimizer, copy=copy),
            *(Snapshot(inner(follower), copy=copy) for follower in self.copies),
        ]

    def restore(self, snapshots: Iterable[Snapshot]) -> None:
        """Restores snapshots, and traces the channels again."""
        for snapshot in snapshots:
            snapshot.restore()
        self.trace_again()  # the graph and shapes are those of the smaller network

    # --- several processes --------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Broadcasts rank 0's buffers and factors of P, and raises if the ranks differ in anything else."""
        if self.ranks is None:
            return
        self.ranks.agree("the network", fingerprint(self.model, self.optimizer, values=False))
        buffers = [buffer for network in (self.model, *self.copies) for buffer in network.buffers()]
        factors = self.optimizer.inverse_tensors(factors_only=True) if isinstance(self.optimizer, RLS) else []
        self.ranks.exchange([[*buffers, *factors]])
        self.ranks.agree("the network", fingerprint(self.model, self.optimizer))

    def agree(self, what: str, value: object) -> None:
        """Raises if the ranks do not have the same value."""
        if self.ranks is not None:
            self.ranks.agree(what, value)

    def mean(self, value: float) -> float:
        """Returns the mean of a value over all ranks."""
        return value if self.ranks is None else math.fsum(self.ranks.gather(value)) / self.ranks.size

    def first(self, value: T) -> T:
        """Returns the value of rank 0."""
        return value if self.ranks is None else self.ranks.first(value)

    def rebuild_wrapper(self) -> None:
        """Rebuilds DistributedDataParallel for the present parameters, as its buckets have the old sizes.

        Frees the parameters that a trial has gathered of a network divided by ``fully_shard``.
        """
        settle(self.model)
        if self._wrapper is not None:
            rebuild(self._wrapper)

    def _find_graph(self) -> ChannelGraph:
        plain = measurable(self.model)
        graph = find_groups(plain, self._example_inputs, self._ignore)
        if plain is not self.model:
            graph = graph.moved_to(dict(zip(plain.modules(), self.model.modules(), strict=True)))
        open_attention_of(graph)
        if not graph.groups:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in graph.skipped.items())
            raise ValueError(f"the model has nothing to prune. {reasons}")
        return graph


def apply_cuts(
    model: nn.Module, cuts: Cuts, optimizer: Optimizer | None = None, copies: Iterable[nn.Module] = ()
) -> None:
    """Applies a plan to the network, its optimizer's state and structurally equal copies.

    Parameters and buffers stay the same objects with new data, in new storage: the old tensors are not written to.
    ``.grad`` of a cut parameter is dropped; ``requires_grad``, hooks and memory format stay. In the optimizer's state,
    every tensor with as many dimensions as its parameter is cut along those that have the parameter's size. All else
    (step counts, entries that are not tensors) stays as it is. Everything is computed before anything changes, so an
    error leaves all as it was.

    Args:
        model: The network that the plan was made for.
        cuts: The plan, from ``plan_cuts``.
        optimizer: The optimizer whose state mirrors the parameters.
        copies: Networks of the same structure, such as moving averages.

    Raises:
        ValueError: A tensor is missing or has another shape than the plan says, or the optimizer keeps a state that
            does not mirror its parameter.
    """
    changes: list[Callable[[], None]] = []
    for number, network in enumerate([model, *copies]):
        what = "the model" if number == 0 else f"copy {number} of the model"
        changes += _changes(inner(network), cuts, optimizer, what)
    for change in changes:
        change()


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def inner(copy: nn.Module) -> nn.Module:
    """Returns the network inside a copy that may be wrapped in an ``AveragedModel``."""
    return copy.module if isinstance(copy, AveragedModel) else copy


def _changes(model: nn.Module, cuts: Cuts, optimizer: Optimizer | None, what: str) -> list[Callable[[], None]]:
    changes: list[Callable[[], None]] = []
    done: set[int] = set()
    for name, dims in cuts.tensors.items():
        tensor = _tensor(model, name)
        if tensor is None or tensor.shape != cuts.shapes[name]:
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ValueError(f"{name} of {what} {found}, the plan is for shape {tuple(cuts.shapes[name])}")
        if id(tensor) in done:
            # Two layers share it, and the plan cuts both alike.
            continue
        done.add(id(tensor))
        changes.append(partial(replace_data, tensor, cuts.cut(name, tensor)))
        if optimizer is not None and tensor in optimizer.state:
            state = optimizer.state[tensor]
            changes.append(partial(state.update, _cut_state(name, state, tensor, dims)))
    for module, values in cuts.attributes.items():
        layer = model.get_submodule(module)
        changes.append(partial(write_sizes, layer, values))
        if isinstance(layer, nn.RNNBase):
            changes.append(layer.flatten_parameters)  # otherwise cuDNN copies the weights in every forward
    return changes


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    path, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module._buffers[own] if own in module._buffers else module._parameters.get(own)


def _cut_state(name: str, state: dict[str, object], parameter: Tensor, dims: dict[int, Tensor]) -> dict[str, Tensor]:
    """Cuts the entries that mirror the parameter; Adafactor's row and column statistics only where they mirror it."""
    smaller: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.numel() <= 1:
            continue
        if value.ndim != parameter.ndim or any(value.shape[dim] not in (1, parameter.shape[dim]) for dim in dims):
            raise ValueError(
                f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {name!r} of shape "
                f"{tuple(parameter.shape)}, which cannot be cut: prune with an optimizer whose state has "
                "the shapes of the parameters, such as SGD, AdamW or RLS"
            )
        mirrored = {dim: keep for dim, keep in dims.items() if value.shape[dim] == parameter.shape[dim]}
        if mirrored:
            smaller[key] = cut(value, mirrored)
    return smaller
