"""Recording of a layer's mean input in forward and backward passes, for the next optimizer step.

Each layer has one forward hook. It averages the layer's input at once (a vector) and waits for the gradient: only a
forward whose gradient reaches the layer's parameters counts. Forwards without grad, evaluation, ``torch.autograd.grad``
with respect to an input (adversarial examples, gradient penalties) and the extra forwards of activation checkpointing
leave no trace.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rlsprune.model.compiled import enlist, exporting, with_gradient_noticed
from rlsprune.model.scales import warn_of_scales
from rlsprune.model.tensors import full_precision, host_waits
from rlsprune.optim.layers import Layer, mean_input


class Recorder:
    """Collects one layer's mean input over the backward passes before a step."""

    def __init__(self, dtype: torch.dtype | None, groups: int, fsdp: bool) -> None:
        """Starts with nothing collected.

        Args:
            dtype: Dtype of the mean; None for float32, or the weight's if wider.
            groups: Number of groups of the layer.
            fsdp: Whether ``fully_shard`` divides the layer: the gradient then leaves the parameter that the layer is
                called with as soon as it arrives.
        """
        self.dtype, self.groups, self.fsdp = dtype, groups, fsdp
        self._seen = self._told = False
        self.clear()

    def clear(self) -> None:
        """Forgets everything collected."""
        self.mean: Tensor | None = None
        """Mean input over all rows collected, ``(groups, n)``, or None if no gradient arrived."""
        self._rows: float | Tensor = 0
        self._backward_id: int | None = None

    def __reduce__(self) -> tuple[type[Recorder], tuple[torch.dtype | None, int, bool]]:
        return Recorder, (self.dtype, self.groups, self.fsdp)

    @property
    def empty(self) -> bool:
        """Whether gradients arrived, but only of batches without a single row."""
        return self.mean is None and self._backward_id is not None

    def precision(self, weight: Tensor) -> torch.dtype:
        """Returns the dtype of P and of the mean input: as asked for, else float32 or the weight's if wider."""
        return self.dtype or torch.promote_types(weight.dtype, torch.float32)

    def collected(self, weight: Tensor, biased: bool) -> Tensor:
        """Returns what was collected as one vector: the sum of inputs, the number of rows, and 1 if there are any."""
        if self.mean is None:
            inputs = self.groups * (weight.shape[1:].numel() + biased)
            return torch.zeros(inputs + 2, dtype=self.precision(weight), device=weight.device)
        ends = torch.tensor([self._rows, 1], dtype=self.mean.dtype).to(weight.device, non_blocking=True)
        return torch.cat([(self.mean * self._rows).to(weight.device).flatten(), ends])

    def replace(self, collected: Tensor, members: int) -> Tensor | None:
        """Replaces what was collected by what several processes have collected together.

        Args:
            collected: Sum of their vectors.
            members: Number of processes.

        Returns:
            On an accelerator, where no value is read here, a flag: whether all processes or none had rows, as required.
        """
        sums, rows, seen = collected[:-2].view(self.groups, -1), collected[-2], collected[-1]
        if not host_waits(collected.device):
            self.mean, self._rows = (sums / rows, float(rows)) if rows else (None, 0)
            return None
        if self.mean is None:
            return seen == 0
        self.mean, self._rows = sums / rows, rows
        return seen == members

    def observe(self, layer: Layer, inputs: Tensor, output: Tensor) -> None:
        """Averages the layer's input after a forward, and counts it once the gradient arrives."""
        leaf = next((p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad), None)
        if leaf is None or not (torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        if not self._seen:
            self._seen = True
            warn_of_scales(layer, inputs)
        mean, rows = self._mean_input(layer, inputs)
        accumulator = get_gradient_edge(leaf).node

        def arrived(delta: Tensor) -> None:
            try:
                if not torch._C._will_engine_execute_node(accumulator):
                    return
            except RuntimeError:  # torch.autograd.grad of the parameter itself: nothing is accumulated in .grad
                return
            self.commit(leaf.grad is None, mean, rows)

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    def told(self, layer: Layer, inputs: Tensor) -> None:
        """Does what `observe` and the gradient after it do, in one call, for compiled code."""
        leaf = layer.weight if layer.weight.requires_grad or layer.bias is None else layer.bias
        self.commit(leaf.grad is None, *self._mean_input(layer, inputs))

    def _mean_input(self, layer: Layer, inputs: Tensor) -> tuple[Tensor, int]:
        self.groups = getattr(layer, "groups", 1)  # a prune may have changed them
        with full_precision(inputs.device):
            return mean_input(layer, inputs.detach(), self.precision(layer.weight))

    def warn_unseen(self, name: str, fallback_lr: float) -> None:
        """Warns, once, that momentum SGD trains a layer whose gradient came without a forward."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"layer {name!r} got a gradient, but its module was not called, so RLS does not know its input and "
                f"trains it by momentum SGD at fallback_lr={fallback_lr}: call the module so that RLS can train it",
                stacklevel=5,
            )

    def commit(self, grad_is_none: bool, mean: Tensor, rows: int) -> None:
        """Adds a batch whose gradient has arrived.

        A gradient that is None before a new backward pass was dropped by the user, so what was collected with it is
        dropped as well.
        """
        backward_id = torch._C._current_graph_task_id()
        if grad_is_none and not self.fsdp and backward_id != self._backward_id:
            self.clear()
        self._backward_id = backward_id
        if not rows:
            return
        self._rows += rows
        self.mean = mean if self.mean is None else self.mean.to(mean.device).lerp(mean, rows / self._rows)


class ForwardHook:
    """The one hook on a layer. It holds the recorder weakly: a dead optimizer leaves an idle hook behind.

    Copied or pickled together with its optimizer it serves the copy; a copy of the model alone gets an idle hook.
    """

    def __init__(self, recorder: Recorder | None, layer: Layer | None = None) -> None:
        self._recorder: Callable[[], Recorder | None] = _nobody if recorder is None else weakref.ref(recorder)
        self._number: int | None = None
        if layer is not None:
            self.__setstate__(layer)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[Recorder | None], Layer | None]:
        # The layer comes last, as a state: it holds this hook itself.
        return ForwardHook, (self._recorder(),), self._layer()

    def __setstate__(self, layer: Layer) -> None:
        self._layer = weakref.ref(layer)
        if (recorder := self._recorder()) is not None:
            self._number = enlist(recorder, layer)

    def __call__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Hands the layer's input and output to the recorder; in compiled code the result replaces that output."""
        if self._number is None or exporting():
            return None
        inputs = args[0] if args else kwargs["input"]
        if torch.compiler.is_compiling():
            return with_gradient_noticed(layer, inputs, output, self._number)
        if (recorder := self._recorder()) is not None:
            recorder.observe(layer, inputs, output)
        return None


def _nobody() -> None:
    """Returns None, as a dead weak reference does."""
