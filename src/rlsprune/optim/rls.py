"""The RLS optimizer: a `torch.optim.Optimizer` over a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from rlsprune.distributed.ranks import find_ranks
from rlsprune.model.arguments import readable_state, shown
from rlsprune.model.calls import unwrap
from rlsprune.model.interrupts import uninterrupted
from rlsprune.model.tensors import forget_compiled_code, full_precision, is_sharded, local, placed_like, tensors_in
from rlsprune.optim import team
from rlsprune.optim.checks import check_settings, states_for
from rlsprune.optim.entries import RANK, Form, form_of, renewed
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.health import LayerHealth, layer_health
from rlsprune.optim.layer_step import LayerStep, ReadyLayer, equal_layers
from rlsprune.optim.layers import divide
from rlsprune.optim.packing import INVERSE, VELOCITY, unpack_all
from rlsprune.optim.recorder import ForwardHook, Recorder
from rlsprune.optim.sgd_step import SGDStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RLS(Optimizer):
    """Recursive least squares for neural networks, equations (16) to (22) of the paper.

    Each Linear and Conv layer l keeps `P`, the inverse autocorrelation of its mean inputs (a bias counts as an
    input that is always 1). With the batch's mean input `x`, every step computes

        u = P x
        h = λ + k·xᵀu
        Ψ ← α·Ψ − (η/h)·P ∇W
        W ← W + Ψ
        P ← (P − (k/h)·u uᵀ) / λ

    P is kept in factors, ``P⁻¹ = β(I + CᵀC)`` with up to ``rank`` rows in C and a buffer of half as many: a layer of
    n inputs costs 1.5·rank·n numbers and two thin products. It is exact until C is full; from then on C keeps its
    strongest directions. ``rank=None`` keeps P whole, n×n, as in the paper.

    Momentum SGD trains all other parameters (batch norm, embeddings, …) in the last parameter group, so one
    optimizer trains any network. Each preconditioned layer has its own parameter group, with the layer's ``"name"``;
    the paper's η^l is that group's ``"lr"``.

    Less usual cases:

    - A layer called several times, and modules that share all their parameters, are one layer whose mean input is the
      mean over all calls. Momentum SGD trains modules that share only some of their parameters, with a warning.
    - A layer without a gradient keeps its weights, velocity and P. A frozen layer costs nothing until it is unfrozen;
      a frozen bias (or weight) of a trained layer counts as having a zero gradient.
    - With several backward passes before a step (gradient accumulation), the mean input is averaged over them by rows.

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
        *,
        lr: float = 1.0,  # η
        momentum: float = 0.5,  # α
        forgetting: float = 1.0,  # λ
        mean_scale: float = 0.1,  # k
        p0: float = 1.0,
        rank: int | None = RANK,
        weight_decay: float = 0.0,
        fallback_lr: float = 0.1,
        dtype: torch.dtype | None = None,
        on_fault: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Registers one forward hook per layer; see the class for what each setting does.

        Args:
            model: The module to train, or a DistributedDataParallel or compiled wrapper of it. RLS trains all its
                parameters.
            lr: η, the gradient scaling factor of every preconditioned layer. With batch norm start at 0.1: it removes
                the mean of the inputs, which P would have damped, and η is a rate of plain SGD there.
            momentum: α in [0, 1), also of the momentum SGD for the other parameters.
            forgetting: λ in (0, 1]. Below 1 old inputs fade; inputs that are always zero do not wind P up.
            mean_scale: k > 0, the weight of a batch's mean input in P.
            p0: P starts at p0·I. With 1, η is an ordinary learning rate.
            rank: Number of directions of the mean inputs that P distinguishes, by default 16. Layers with at most
                3·rank inputs keep P whole, which is smaller. With None all layers do.
            weight_decay: Decoupled: ``W ← (1 − η·decay)·W`` before the step.
            fallback_lr: The learning rate of the momentum SGD for every other parameter.
            dtype: The dtype of P; None for float32, or the weight's if wider. Never half.
            on_fault: ``"raise"`` or ``"skip"`` (with a warning) a step whose input, gradient or P is not finite, or
                whose input is too large for the dtype of P. Either way nothing has changed. On an accelerator a later
                step reports it, because looking at once would make the host wait; `report_faults` waits.
            process_group: The processes that train this model together, each with its share of every batch; None for
                those of the DistributedDataParallel wrapper, or all, if ``torch.distributed`` is initialised. Their
                mean inputs are averaged, so P is the same everywhere as with the whole batch in one process.
        """
        settings = {"lr": lr, "momentum": momentum, "forgetting": forgetting, "mean_scale": mean_scale}
        settings |= {"p0": p0, "weight_decay": weight_decay}
        check_settings(model, **settings, rank=rank, fallback_lr=fallback_lr, dtype=dtype, on_fault=on_fault)
        self.ranks = find_ranks(model, process_group)
        """The processes that train together with this one, itself included; None if it is alone."""
        parts = divide(unwrap(model))
        self.rank = rank
        """Number of directions that P keeps apart; None for P whole."""
        self._fallback_lr = fallback_lr
        self._faults = FaultWatch(on_fault)
        self._recorders = {
            name: Recorder(dtype, getattr(layers[0], "groups", 1), is_sharded(layers[0].weight))
            for name, layers in parts.layers.items()
        }
        self._handles: list[RemovableHandle] | None = []

        groups: list[dict[str, Any]] = [
            {"params": list(layers[0].parameters(recurse=False)), "name": name, "preconditioned": True}
            for name, layers in parts.layers.items()
        ]
        if parts.others:
            groups.append({"params": parts.others, "name": "fallback", "preconditioned": False})
        super().__init__(groups, {name: float(value) for name, value in settings.items()})  # a large int overflows
        if self.ranks is not None:
            team.agree(self.ranks, self.param_groups)

        try:
            with uninterrupted():
                for name, layers in parts.layers.items():
                    for layer in layers:
                        hook = ForwardHook(self._recorders[name], layer)
                        # Before all other hooks: that of fully_shard takes the weight away.
                        self._handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
                forget_compiled_code()
            for name, reason in parts.left_out.items():
                warnings.warn(f"layer {name!r} is trained by momentum SGD, not RLS: {reason}", stacklevel=2)
        except BaseException:
            self.close()
            raise

    # --- the usual contract -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group that momentum SGD trains (at ``fallback_lr`` unless the group has its own ``"lr"``)."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'the group is {shown(param_group)}: give a dict with "params"')
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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; none if there is a fault.

        Ctrl-C in the middle of a step is raised when the step is done.

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
        with uninterrupted(), torch.no_grad():
            try:
                with full_precision(self.param_groups[0]["params"][0].device):  # P is never touched in half precision
                    self._step()
            finally:
                for recorder in self._recorders.values():
                    recorder.clear()
        return loss

    def report_faults(self) -> None:
        """Waits for the steps taken so far, and raises or warns if one of them was not finite.

        On the CPU every step reports its own faults. On an accelerator a later step does.

        Raises:
            FloatingPointError: A step was not finite, with ``on_fault="raise"``.
        """
        self._faults.report(wait=True)

    def _step(self) -> None:
        layers: list[ReadyLayer] = []
        steps: list[LayerStep | SGDStep] = []
        checks = [] if self.ranks is None else team.share_means(self.ranks, self.param_groups, self._recorders)
        for place, group in enumerate(self.param_groups):
            trained = [p for p in group["params"] if p.grad is not None]
            if not group["preconditioned"]:
                steps += SGDStep.prepare(place, group, trained, group["lr"])
            elif trained and (mean := self._recorders[group["name"]].mean) is not None:
                layers.append(ReadyLayer.of(place, group, mean, self.state, self.rank))
            else:
                unpack_all(self.state, group["params"])  # layers that share memory with it go on without it
                recorder = self._recorders[group["name"]]
                if trained and not recorder.empty:
                    recorder.warn_unseen(group["name"], self._fallback_lr)
                    steps += SGDStep.prepare(place, group, trained, self._fallback_lr)
        steps += [LayerStep.prepare(equal, self.state) for equal in equal_layers(layers, self.state)]

        checks += [check for step in steps for check in step.checks]
        if self.ranks is not None and any(is_sharded(p) for group in self.param_groups for p in group["params"]):
            checks = team.share_checks(self.ranks, checks, self.param_groups[0]["params"][0].device)
        if (gates := self._faults.gates(checks)) is not None:
            for step in steps:
                step.apply(self.state, gates[step.device])

    # --- P ------------------------------------------------------------------------------------------------------------

    def inverse(self, name: str) -> Tensor:
        """Returns P of the layer of that name, bias row last: n×n, or (groups, n, n) for a grouped convolution.

        A P in factors is made whole for this call. A whole P is returned itself, and the next step changes it.

        Raises:
            RuntimeError: No step has trained the layer yet.
        """
        form = self.form(self._layers(name)[0]["params"][0])
        if form is None:
            raise RuntimeError(f"layer {name!r} has no P yet: it starts with the first step that trains the layer")
        dense = form.dense()
        return dense[0] if len(dense) == 1 else dense

    def form(self, weight: Tensor) -> Form | None:
        """Returns P of a layer's weight in the form in which it is kept, or None."""
        entry = self.state.get(weight, {}).get(INVERSE)
        return None if entry is None else form_of(entry)

    def inverse_tensors(self, factors_only: bool = False) -> list[Tensor]:
        """Returns the tensors of all P by layer, or only of those in factors, which ranks may round differently."""
        entries = [self.state.get(group["params"][0], {}).get(INVERSE, {}) for group in self._layers()]
        return tensors_in([entry for entry in entries if not (factors_only and "P" in entry)])

    def _layers(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns the parameter groups of all preconditioned layers, or of one."""
        found = [group for group in self.param_groups if group["preconditioned"] and name in (None, group["name"])]
        if name is not None and not found:
            known = ", ".join(map(repr, self._recorders))
            raise KeyError(f"no preconditioned layer is called {name!r}; there are {known}")
        return found

    @torch.no_grad()
    def reset(self, name: str | None = None) -> None:
        """Sets P of one layer, or of all, back to p0·I. Weights and velocities stay."""
        for group in self._layers(name):
            own = self.state.get(group["params"][0], {})
            if INVERSE in own:
                own[INVERSE] = renewed(own[INVERSE], form_of(own[INVERSE]).like.shape[::2], group["p0"])

    def check(self, at_most: int | None = None) -> dict[str, LayerHealth]:
        """Measures the health of every layer's P: extreme eigenvalues, trace, asymmetry. Costs n³ where P is whole.

        Args:
            at_most: Largest number of inputs of a layer whose whole P is measured; None for all.
        """
        self.report_faults()
        forms = {group["name"]: self.form(group["params"][0]) for group in self._layers()}
        return {
            name: layer_health(name, form)
            for name, form in forms.items()
            if form is not None and (at_most is None or form.like.shape[-2] <= at_most)
        }

    def memory_usage(self) -> dict[str, int]:
        """Returns the bytes of state in this process, for ``"inverse"`` (all P), ``"velocity"`` and in ``"total"``."""
        velocities = [local(state[VELOCITY]) for state in self.state.values() if VELOCITY in state]
        usage = {INVERSE: sum(t.nbytes for t in self.inverse_tensors()), VELOCITY: sum(t.nbytes for t in velocities)}
        return usage | {"total": sum(usage.values())}

    # --- copying, saving, closing -------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of an optimizer over the same layers; P keeps its precision, whatever the weight's.

        It may come from any number of processes. P keeps the form it was saved in, whatever this optimizer's ``rank``.

        Raises:
            ValueError: Layers or shapes differ. Nothing changes then.
        """
        with readable_state("RLS"):
            states = states_for(self.param_groups, state_dict)
        with uninterrupted():
            super().load_state_dict(state_dict)
            for p, saved in states.items():  # torch has cast them to the parameter's dtype
                copied = partial(Tensor.to, device=p.device, copy=True)
                if INVERSE in saved:
                    self.state[p][INVERSE] = tree_map_only(Tensor, copied, saved[INVERSE])
                if VELOCITY in saved:
                    self.state[p][VELOCITY] = placed_like(p, copied(saved[VELOCITY]))

    def __getstate__(self) -> dict[str, Any]:
        keys = ("_recorders", "_handles", "rank", "_faults", "_fallback_lr", "ranks")
        return super().__getstate__() | {key: self.__dict__[key] for key in keys}

    def close(self) -> None:
        """Removes the hooks from the model. The state stays readable; further steps raise."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
