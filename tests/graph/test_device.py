"""Groups are found wherever the network lies: on a device that refuses tensors of the CPU, as accelerators do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rlsprune.graph import find_groups
from zoo import ZOO

DEVICE = torch.device("lazy", 0)  # a device that torch knows without any hardware


class OnDevice(Tensor):
    """A tensor of the CPU that says it lies on the device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(cls, held.size(), held.stride(), dtype=held.dtype, device=DEVICE)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Makes tensors on the device, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the CPU, unless tensors of both are given; indices in brackets may be of the CPU, as with CUDA."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = any(isinstance(tensor, OnDevice) for tensor in given)
    name = func._schema.name.removeprefix("aten::")
    if here and name not in ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"):
        assert all(isinstance(tensor, OnDevice) or not tensor.dim() for tensor in given), f"{name} mixes devices"
    if kwargs.get("device") is not None:
        here = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own_args, own_kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, OnDevice) else leaf, (args, kwargs))
    made = func(*own_args, **own_kwargs)
    if name.endswith("_"):
        return args[0]
    return tree_map(lambda leaf: OnDevice(leaf) if here and isinstance(leaf, Tensor) else leaf, made)


def moved(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(OnDevice(parameter.detach()))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = OnDevice(buffer)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return model


@pytest.fixture
def random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the device, which keeps a random state of its own."""
    own = ModuleType("torch.lazy")
    vars(own).update(get_rng_state=lambda *_: torch.empty(0), set_rng_state=lambda *_: None, device_count=lambda: 1)
    monkeypatch.setattr(torch, "lazy", own, raising=False)
    monkeypatch.setitem(sys.modules, "torch.lazy", own)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])  # type: ignore[no-any-return]


def groups_on_the_device(model: nn.Module, x: Tensor) -> dict[str, int]:
    with Device():
        return {group.name: group.size for group in find_groups(moved(model), OnDevice(x))}


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("name", ["vgg", "beit", "vit"])
def test_groups_do_not_depend_on_the_device(name: str) -> None:
    assert groups_on_the_device(ZOO[name].model(), ZOO[name].inputs()) == ZOO[name].groups


@pytest.mark.usefixtures("random_state")
def test_states_of_recurrent_layers_are_found_on_the_device() -> None:
    assert groups_on_the_device(Recurrent(), torch.randn(2, 5, 6)) == {"cell": 8}
