"""The RLS optimizer: a `torch.optim.Optimizer` over a module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rlsprune.distributed.ranks import Ranks, find_ranks
from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import unwrap
from rlsprune.model.tensors import forget_compiled_code, full_precision, is_sharded, local, placed_like
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.health import LayerHealth, layer_health
from rlsprune.optim.layer_step import LayerStep, ReadyLayer, block_sizes, equal_layers, initial_blocks
from rlsprune.optim.layers import Layer, divide
from rlsprune.optim.packing import INVERSE, VELOCITY, unpack_all
from rlsprune.optim.recorder import ForwardHook, Recorder
from rlsprune.optim.sgd_step import PlainStep
from rlsprune.optim.team import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# A layer whose P would be larger than this gets a warning at construction.
LARGE_INVERSE_BYTES = 2**30


class RLS(Optimizer):
    """Recursive least squares for neural networks, equations (16) to (22) of the paper.

    Each Linear and Conv layer l keeps `P`, the inverse autocorrelation of its mean inputs (a bias counts as an
    input that is always 1). With the batch's mean input `x`, every step computes

        u = P x
        h = λ + k·xᵀu
        Ψ ← α·Ψ − (η/h)·P ∇W
        W ← W + Ψ
        P ← (P − (k/h)·u uᵀ) / λ

    All other parameters (batch norm, embeddings, …) are trained by momentum SGD in the last parameter group, so one
    optimizer trains any network. There is one parameter group per preconditioned layer, with the layer's ``"name"``,
    so that the paper's η^l is that group's ``"lr"``.

    What happens in the less usual cases:

    - A layer called several times, and modules that share all their parameters, are one layer whose mean input is the
      mean over all calls. Modules that share only some of their parameters are left to momentum SGD, with a warning.
    - A layer that got no gradient keeps its weights, velocity and P. A frozen layer costs nothing until it is unfrozen;
      a frozen bias (or weight) of a trained layer counts as having a zero gradient.
    - Several backward passes before a step (gradient accumulation): the mean input is averaged over them by rows.
    - Weight decay is decoupled: ``W ← (1 − η·decay)·W`` before the step.
    - When not to use it: layers with tens of thousands of inputs, unless ``block_size`` is set, since P has n² entries.

    Examples:
        >>> import torch, rlsprune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = rlsprune.RLS(model)
        >>> loss = model(torch.rand(16, 4)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.inverse("0").shape
        torch.Size([5, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,  # η
        momentum: float = 0.5,  # α
        forgetting: float = 1.0,  # λ
        mean_scale: float = 0.1,  # k
        p0: float = 1.0,
        weight_decay: float = 0.0,
        block_size: int | None = None,
        fallback_lr: float = 0.1,
        dtype: torch.dtype | None = None,
        on_fault: str = "raise",
        shard: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Registers one forward hook per layer; see the class for what each setting does.

        Args:
            model: The module to train, or a DistributedDataParallel or compiled wrapper of it. All its parameters are
                taken.
            lr: η, the gradient scaling factor of every preconditioned layer.
            momentum: α in [0, 1), also of the momentum SGD for the other parameters.
            forgetting: λ in (0, 1]. Below 1 old inputs fade; inputs that are always zero do not wind P up.
            mean_scale: k > 0, the weight of a batch's mean input in P.
            p0: P starts at p0·I. With 1, η is an ordinary learning rate.
            weight_decay: Decoupled weight decay.
            block_size: P as diagonal blocks of at most this many inputs (whole channels, at least one).
            fallback_lr: Learning rate of the momentum SGD for every other parameter.
            dtype: Of P; None for float32, or the weight's if wider. Never half.
            on_fault: ``"raise"`` or ``"skip"`` (with a warning) a step whose input, gradient or P is not finite. Either
                way nothing has changed. On an accelerator a later step tells, since looking at once would make the
                host wait; :meth:`report_faults` waits and tells.
            shard: With several processes, keep P and velocity of a layer, and compute its step, on one of them alone
                (balanced by cost), which sends the new weights to the others. With one process it changes nothing.
            process_group: The processes that train this model together, each with its share of every batch; None for
                those of the DistributedDataParallel wrapper, or all, if ``torch.distributed`` is initialised. Their
                mean inputs are averaged, so P is the same everywhere as with the whole batch in one process.
        """
        check_argument("lr", lr, 0 <= lr < math.inf, "a number ≥ 0")
        check_argument("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
        check_argument("forgetting", forgetting, 0 < forgetting <= 1, "in (0, 1]")
        check_argument("mean_scale", mean_scale, 0 < mean_scale < math.inf, "a number > 0")
        check_argument("p0", p0, 0 < p0 < math.inf, "a number > 0")
        check_argument("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "a number ≥ 0")
        check_argument("fallback_lr", fallback_lr, 0 <= fallback_lr < math.inf, "a number ≥ 0")
        check_argument("block_size", block_size, block_size is None or block_size >= 1, "None or at least 1")
        check_argument("on_fault", on_fault, on_fault in ("raise", "skip"), "'raise' or 'skip'")
        check_argument(
            "dtype", dtype, dtype in (None, torch.float32, torch.float64), "None, torch.float32 or torch.float64"
        )
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"RLS takes the module itself, not {type(model).__name__}: pass model, not model.parameters()"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("no parameter of the model requires a gradient: unfreeze the layers to train first")

        ranks = find_ranks(model, process_group)
        model = unwrap(model)
        parts = divide(model)
        self._block_size, self._fallback_lr = block_size, fallback_lr
        self._faults = FaultWatch(on_fault)
        self._recorders = {
            name: Recorder(
                dtype,
                getattr(layers[0], "groups", 1),
                shared=ranks is not None,
                fsdp=is_sharded(layers[0].weight),
            )
            for name, layers in parts.layers.items()
        }
        self._probes: dict[str, Tensor] = {}
        self._unseen: set[str] = set()
        self._handles: list[RemovableHandle] | None = []

        shared = {"momentum": momentum, "weight_decay": weight_decay}
        groups: list[dict[str, Any]] = [
            {"params": list(layers[0].parameters(recurse=False)), "name": name, "preconditioned": True}
            for name, layers in parts.layers.items()
        ]
        if parts.others:
            groups.append({"params": [p for _, p in parts.others], "name": "fallback", "preconditioned": False})
        super().__init__(groups, {"lr": lr, "forgetting": forgetting, "mean_scale": mean_scale, "p0": p0, **shared})
        self._team = None if ranks is None else Team(ranks, self.param_groups, shard, block_size)

        for name, layers in parts.layers.items():
            for layer in layers:
                hook = ForwardHook(self._recorders[name], layer)
                # First of all hooks: that of fully_shard takes the weight away.
                self._handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
            self._warn_if_large(name, layers[0])
        forget_compiled_code()
        for name, reason in parts.left_out.items():
            warnings.warn(f"layer {name!r} is trained by momentum SGD, not RLS: {reason}", stacklevel=2)

    # --- the usual contract -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group trained by momentum SGD (at ``fallback_lr`` unless it says otherwise)."""
        if not param_group.setdefault("preconditioned", False):
            param_group.setdefault("lr", self._fallback_lr)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and with them the inputs collected since the last step."""
        super().zero_grad(set_to_none)
        for recorder in self._recorders.values():
            recorder.clear()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient: all of them, or none if a fault is found.

        Raises:
            FloatingPointError: Input, gradient or P of a layer is not finite, with ``on_fault="raise"``.
        """
        if self._handles is None:
            raise RuntimeError("this optimizer was closed: create a new one to go on training")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._faults.report()
        try:
            with full_precision(self.param_groups[0]["params"][0].device):  # P is never touched in half precision
                self._step()
        finally:
            for recorder in self._recorders.values():
                recorder.clear()
        return loss

    def report_faults(self) -> None:
        """Waits for the steps taken so far, and raises or warns if one of them was not finite.

        On the CPU every step tells by itself. On an accelerator a later one does, when the news has arrived.

        Raises:
            FloatingPointError: One was not, with ``on_fault="raise"``.
        """
        self._faults.report(wait=True)

    def _step(self) -> None:
        layers: list[ReadyLayer] = []
        steps: list[LayerStep | PlainStep] = []
        checks = [] if self._team is None else self._team.share_means(self.param_groups, self._recorders)
        for place, group in enumerate(self.param_groups):
            if self._team is not None and not self._team.owns(group):
                continue
            trained = [p for p in group["params"] if p.grad is not None]
            if not group["preconditioned"]:
                steps += PlainStep.prepare(place, group, trained, group["lr"])
                continue
            idle = not trained or self._recorders[group["name"]].empty  # no input, no step
            layer = None if idle else self._ready(place, group)
            if layer is not None:
                layers.append(layer)
            else:
                unpack_all(self.state, group["params"])  # the layers that it lies in memory with go on without it
                steps += [] if idle else PlainStep.prepare(place, group, trained, self._fallback_lr)
        steps += [LayerStep.prepare(equal, self.state) for equal in equal_layers(layers, self.state)]

        checks += [check for step in steps for check in step.checks]
        if self._team is not None:
            checks = self._team.share_checks(checks, self.param_groups[0]["params"][0].device)
        gates = self._faults.gates(checks)
        if gates is None:
            return
        for step in steps:
            step.apply(self.state, gates[step.device])
        if self._team is not None:
            self._team.publish(self.param_groups)

    def _ready(self, place: int, group: dict[str, Any]) -> ReadyLayer | None:
        """What the layer's step starts from, or None if its forward was never seen."""
        name, recorder = group["name"], self._recorders[group["name"]]
        weight, bias = group["params"][0], group["params"][1] if len(group["params"]) > 1 else None
        if recorder.mean is None:
            if name not in self._unseen:
                self._unseen.add(name)
                warnings.warn(
                    f"layer {name!r} got a gradient, but its module was not called, so RLS does not know its input and "
                    f"takes momentum SGD steps at fallback_lr={self._fallback_lr}: call the module for RLS to train it",
                    stacklevel=6,
                )
            return None
        mean = recorder.mean.to(weight.device)
        state = self.state[weight]
        blocks = state.get(INVERSE)
        if blocks is None:
            blocks = state[INVERSE] = initial_blocks(mean, weight, group["p0"], self._block_size)
        elif blocks[0].device != mean.device or blocks[0].dtype != mean.dtype:  # the model was moved
            blocks = state[INVERSE] = [P.to(mean) for P in blocks]
        batch = recorder.batch() if len(blocks) == 1 else None
        probed = None if batch is None else (*batch, self._probe(name, mean.shape[-1], batch[0]))
        return ReadyLayer(place, group, weight, bias, mean, probed)

    def _probe(self, name: str, size: int, like: Tensor) -> Tensor:
        probe = self._probes.get(name)
        if probe is None or len(probe) != size or probe.dtype != like.dtype:
            generator = torch.Generator().manual_seed(size)  # the global random state is the user's
            probe = self._probes[name] = torch.randn(size, generator=generator, dtype=like.dtype)
        return probe

    # --- P ------------------------------------------------------------------------------------------------------------

    def inverse(self, name: str) -> Tensor:
        """P of the layer with that module name, bias row last: n×n, or (groups, n, n) for a grouped convolution.

        A copy if the layer's P is kept in blocks or by another rank, else, until the next step, the matrix itself. With
        ``shard=True`` all ranks have to call this together.
        """
        blocks = self.blocks(self._group(name)["params"][0])
        if blocks is None:
            raise RuntimeError(f"layer {name!r} has no P yet: it starts with the first step that trains the layer")
        if len(blocks) > 1:
            dense = torch.stack(
                [
                    torch.block_diag(*parts)  # type: ignore[no-untyped-call]
                    for parts in zip(*blocks, strict=True)
                ]
            )
        else:
            dense = blocks[0]
        return dense[0] if len(dense) == 1 else dense

    def blocks(self, weight: Tensor) -> list[Tensor] | None:
        """P of a layer's weight as diagonal blocks, each (groups, b, b), or None; see `inverse`."""
        blocks: list[Tensor] | None = self.state.get(weight, {}).get(INVERSE)
        group = next((g for g in self.param_groups if g["preconditioned"] and g["params"][0] is weight), None)
        if self._team is not None and self.sharded and group is not None:
            (held,) = self._team.whole([group | {"params": [weight]}], [None if blocks is None else {INVERSE: blocks}])
            blocks = None if held is None else held[INVERSE]
        return blocks

    def _group(self, name: str) -> dict[str, Any]:
        for group in self.param_groups:
            if group["preconditioned"] and group["name"] == name:
                return group
        known = ", ".join(repr(known) for known in self._recorders)
        raise KeyError(f"no preconditioned layer is called {name!r}; there are {known}")

    def _own_blocks(self, name: str) -> list[Tensor] | None:
        blocks: list[Tensor] | None = self.state.get(self._group(name)["params"][0], {}).get(INVERSE)
        return blocks

    @torch.no_grad()
    def reset(self, name: str | None = None) -> None:
        """Sets P of one layer, or of all, back to p0·I. Weights and velocities stay."""
        for group in self.param_groups:
            if group["preconditioned"] and name in (None, group["name"]):
                for P in self._own_blocks(group["name"]) or ():
                    P.zero_().diagonal(dim1=-2, dim2=-1).fill_(group["p0"])
        if name is not None:
            self._group(name)

    def check(self, at_most: int | None = None) -> dict[str, LayerHealth]:
        """Health of every layer's P: extreme eigenvalues, trace and asymmetry. Costs n³ per layer.

        With ``shard=True``, of the layers whose P this rank keeps.

        Args:
            at_most: Layers with more inputs than this in a block of P are left out; None: all are measured.
        """
        self.report_faults()
        kept = {name: blocks for name in self._recorders if (blocks := self._own_blocks(name))}
        return {
            name: layer_health(name, blocks)
            for name, blocks in kept.items()
            if at_most is None or max(P.shape[-1] for P in blocks) <= at_most
        }

    def memory_usage(self) -> dict[str, int]:
        """Bytes of state held by this process, for ``"inverse"`` (all P), ``"velocity"`` and in ``"total"``."""
        usage = {INVERSE: 0, VELOCITY: 0}
        for state in self.state.values():
            usage[INVERSE] += sum(P.nbytes for P in state.get(INVERSE, ()))
            usage[VELOCITY] += local(state[VELOCITY]).nbytes if VELOCITY in state else 0
        return usage | {"total": sum(usage.values())}

    def _warn_if_large(self, name: str, layer: Layer) -> None:
        weight = layer.weight
        sizes = block_sizes(
            weight.shape[1:].numel(), weight.shape[2:].numel(), layer.bias is not None, self._block_size
        )
        groups = getattr(layer, "groups", 1)
        size = groups * sum(b * b for b in sizes) * self._recorders[name].precision(weight).itemsize
        if size > LARGE_INVERSE_BYTES:
            warnings.warn(
                f"P of layer {name!r} ({sum(sizes)} inputs) takes {size / 2**30:.1f} GiB: set block_size, for example "
                f"RLS(..., block_size=4096), to keep it in diagonal blocks",
                stacklevel=3,
            )

    # --- copying, saving, closing -------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train together with this one, itself included; None if it is alone."""
        return None if self._team is None else self._team.ranks

    @property
    def sharded(self) -> bool:
        """Whether each layer's state is kept by one of several processes alone."""
        return self._team is not None and self._team.sharded

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process keeps the state of a parameter: always, but for ``shard=True``."""
        if self._team is None or not self.sharded:
            return True
        return all(self._team.owns(g) for g in self.param_groups if any(p is parameter for p in g["params"]))

    def whole_state(self, states: Sequence[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
        """The states of all parameters, in their order, of which every rank has those that it owns."""
        return list(states) if self._team is None else self._team.whole(self.param_groups, states)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, from all ranks if it is sharded: all of them have to call this then."""
        packed = super().state_dict()
        keys = [key for group in packed["param_groups"] for key in group["params"]]
        states = self.whole_state([packed["state"].get(key) for key in keys])
        packed["state"] |= {key: state for key, state in zip(keys, states, strict=True) if state is not None}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of an optimizer over the same layers; P keeps its precision, whatever the weight's.

        It may come from any number of processes, sharded or not; each keeps what it owns.

        Raises:
            ValueError: Layers or shapes differ. Nothing has changed then.
        """
        saved_groups, groups = state_dict["param_groups"], self.param_groups
        names = [[g.get("name") for g in gs] for gs in (saved_groups, groups)]
        if names[0] != names[1]:
            raise ValueError(
                f"the state dict is of layers {names[0]}, this optimizer of {names[1]}: build the same model"
            )
        states: dict[Tensor, dict[str, Any]] = {}
        own: dict[Any, dict[str, Any]] = {}
        for saved_group, group in zip(saved_groups, groups, strict=True):
            for key, p in zip(saved_group["params"], group["params"], strict=False):
                saved = state_dict["state"].get(key, {})
                self._check_shapes(group.get("name"), p, saved)
                if saved and self.owns(p):
                    states[p] = own[key] = saved
        super().load_state_dict(state_dict | {"state": own})
        for p, saved in states.items():  # torch has cast them to the parameter's dtype
            if INVERSE in saved:
                self.state[p][INVERSE] = [P.to(p.device, copy=True) for P in saved[INVERSE]]
            if VELOCITY in saved:
                self.state[p][VELOCITY] = placed_like(p, saved[VELOCITY].to(p.device, copy=True))

    def _check_shapes(self, name: str | None, p: Tensor, saved: dict[str, Any]) -> None:
        if VELOCITY in saved and saved[VELOCITY].shape != p.shape:
            raise ValueError(
                f"layer {name!r}: the saved velocity is of shape {tuple(saved[VELOCITY].shape)}, the parameter of "
                f"{tuple(p.shape)}: load the pruned model (rlsprune.load) before its optimizer"
            )
        inputs = sum(P.shape[-1] for P in saved.get(INVERSE, ()))
        if inputs and inputs - p.shape[1:].numel() not in (0, 1):
            raise ValueError(f"layer {name!r}: the saved P is for {inputs} inputs, the layer has {p.shape[1:].numel()}")

    def __getstate__(self) -> dict[str, Any]:
        keys = ("_recorders", "_handles", "_block_size", "_faults", "_fallback_lr", "_team")
        return super().__getstate__() | {key: self.__dict__[key] for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading a state dict comes through here too, with groups and states alone.
        super().__setstate__({"_probes": {}, "_unseen": set()} | state)
        if self._team is not None and self._team.ranks is None:
            self._team = None  # unpickled where there are no other processes

    def close(self) -> None:
        """Removes the hooks from the model. The state stays readable; further steps raise."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
