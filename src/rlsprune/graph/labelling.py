"""One run of the network in which every tensor carries the numbers of its channels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from rlsprune.graph.fields import Labelled, compact, placed, varying
from rlsprune.graph.function_call import FunctionCall, UnknownFunctionError
from rlsprune.graph.layers import axis_of, sides, unprunable
from rlsprune.graph.observe import hooked
from rlsprune.graph.recurrent import follow_recurrent
from rlsprune.graph.rules import apply_rule
from rlsprune.graph.slots import Slots
from rlsprune.model.calls import output_tensors
from rlsprune.model.sizes import is_experts
from rlsprune.model.tensors import tensors_in

__all__ = ["Labelling"]

_NOTHING = Labelled()


class Labelling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows channels from the layers that make them to those that read them, function by function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = Slots()
        self.order: dict[nn.Module, int] = {}
        """Module → position of its first call, or of the first use of its parameters."""
        self.multiplies = False
        """Whether outputs of layers were multiplied with each other, as in attention."""
        self._names: dict[nn.Module | None, str] = {module: name for name, module in model.named_modules()}
        # The tensors are kept as well as their ids, or a later tensor could get the id of a freed one.
        self._known: dict[int, tuple[Tensor, Labelled]] = {}
        self._owners: dict[int, nn.Module] = {}
        self._filters: dict[int, tuple[Tensor, Tensor]] = {}
        self._lone_from = 0
        self._within: list[nn.Module] = []
        self._whole: nn.Module | None = None
        """Running module that is followed as a whole, and not function by function."""
        self._number_layers(model)
        self.slots.tie_inside_layers()
        self._number_lone_parameters(model)

    # --- numbering ----------------------------------------------------------------------------------------------------

    def _number_layers(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            tensors = {**module._buffers, **module._parameters}
            for side in sides(module):
                axis = axis_of(module, side)
                numbers = self.slots.add((name, side, None), axis.size, module)
                for slab in axis.slabs:
                    tensor = tensors.get(slab.tensor)
                    if tensor is not None and slab.groups == 1:
                        self._describe(tensor, slab.dim, numbers)
                        self._owners.setdefault(id(tensor), module)
            if isinstance(module, _ConvNd) and isinstance(module._parameters.get("weight"), Tensor):
                ends = [self.slots.numbers((name, side, None)) for side in sides(module)]
                self._filters.setdefault(id(module.weight), (ends[0], ends[-1]))
                self._owners.setdefault(id(module.weight), module)

    def _number_lone_parameters(self, model: nn.Module) -> None:
        self._lone_from = len(self.slots.parent)
        for name, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) in self._known or id(parameter) in self._filters:
                    continue
                self._owners[id(parameter)] = module
                full = f"{name}.{own}" if name else own
                for dim, size in enumerate(parameter.shape):
                    if size > 1:
                        numbers = self.slots.add((full, "both", dim), size, module)
                        self._describe(parameter, dim, numbers)
                        self.slots.keep(numbers if (why := _obstacle(model, name)) else numbers[:0], str(why))

    def _describe(self, tensor: Tensor, dim: int, numbers: Tensor) -> None:
        known = self._known.get(id(tensor), (tensor, Labelled([], True)))[1]
        if tensor.shape[dim] == len(numbers) and not any(dim in varying(labels) for labels in known.fields):
            self._known[id(tensor)] = (tensor, Labelled([*known.fields, placed(numbers, dim, tensor.shape)], True))

    # --- running ------------------------------------------------------------------------------------------------------

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follows the channels through what the model runs in the block."""

        def enter(module: nn.Module, _: Any) -> None:
            self._within.append(module)
            if self._whole is None and (isinstance(module, nn.RNNBase) or is_experts(module)):
                self._whole = module
            self.order.setdefault(module, len(self.order))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while self._within and self._within.pop() is not module:
                pass
            if self._whole is module:
                self._whole = None
            if is_experts(module):
                self._follow_experts(module, args)
            if isinstance(module, nn.RNNBase):
                made = follow_recurrent(module, self._names[module], args, output, self.slots, self._labels_of)
                self._known.update({id(tensor): (tensor, labels) for tensor, labels in made})

        with hooked(model.modules(), enter, leave), self:
            yield

    def finish(self, output: Any) -> None:
        """Keeps the channels that reach the network's output, and makes the last ties."""
        for tensor in output_tensors(output):
            for labels in self._labels_of(tensor).fields:
                self.slots.keep(compact(labels), "its channels reach the network's output")
        self.slots.settle()
        self.slots.tie_shared_parameters()
        self._known.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._known]
        if read and self._whole is None:
            for tensor in read:
                owner = self._owners.get(id(tensor))
                if owner is not None:
                    self.order.setdefault(owner, len(self.order))
            self._follow(func, args, kwargs, result, read)
        return result

    def _follow_experts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Ties what each expert makes inside to what it reads inside; the channels that go in stay."""
        name = self._names[module]
        self.slots.tie_all(self.slots.numbers((name, "out", None)), self.slots.numbers((name, "in", None)))
        for tensor in tensors_in(args):
            for labels in self._labels_of(tensor).fields:
                self.slots.keep(compact(labels), f"{name} reads it in its experts")

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, read: list[Tensor]
    ) -> None:
        results = tensors_in(result)
        name = func._schema.name.partition("::")[2]
        if not results:
            return
        name = name.removesuffix("_") if func._schema.is_mutable else name
        self.multiplies |= name in ("bmm", "baddbmm") or name.startswith("_scaled_dot_product")
        module = self._within[-1] if self._within else None
        operation = FunctionCall(
            name,
            func,
            args,
            kwargs,
            _bound(func, args, kwargs),
            results,
            self._names.get(module, "") or "the network",
            self.slots,
            self._labels_of,
            self._is_lone,
            lambda weight: self._filters.get(id(weight)),
            self._norm(module),
            lambda: None if module is None else unprunable(module),
        )
        try:
            made = apply_rule(operation)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever a function does that no rule foresees, the channels that go into it stay.
            unknown = isinstance(error, UnknownFunctionError)
            why = (
                f"uses it in {name.strip('_')}, which is not understood" if unknown else f"uses it in {name.strip('_')}"
            )
            for tensor in read:
                operation.keep(self._labels_of(tensor).fields, why)
            made = []
        for tensor in results:
            self._known.pop(id(tensor), None)
        for tensor, labels in zip(results, made, strict=False):
            fields = [each for each in labels.fields if varying(each)] if tensor.numel() else []
            if fields:
                self._known[id(tensor)] = (tensor, Labelled(fields, labels.weight))

    def _labels_of(self, tensor: Any) -> Labelled:
        return self._known[id(tensor)][1] if id(tensor) in self._known else _NOTHING

    def _is_lone(self, labels: Tensor) -> bool:
        return int(compact(labels).max()) >= self._lone_from

    def _norm(self, module: nn.Module | None) -> Tensor | None:
        if module is None or sides(module) != ("both",):
            return None
        return self.slots.numbers((self._names[module], "both", None))


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {
        argument.name: kwargs.get(argument.name, given.get(argument.name, argument.default_value))
        for argument in schema
    }


def _obstacle(model: nn.Module, name: str) -> str | None:
    """Returns why a parameter that makes up the weight of a layer cannot be cut, or None."""
    layer_name = name.partition(".parametrizations.")[0] if ".parametrizations." in f"{name}." else name
    layer = model.get_submodule(layer_name)
    why = unprunable(layer) if sides(layer) else None
    return why and f"{layer_name} cannot be cut: {why}"
