"""Layers of equal size are stepped together, in as many kernels as one of them takes, to the same numbers as alone."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlsprune
from rlsprune.optim import rls
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.layer_step import LayerStep, ReadyLayer
from rlsprune.optim.packing import State


class Repeated(nn.Module):
    """A first layer, ``depth`` equal blocks of a convolution, a grouped one and a norm, and a last layer."""

    def __init__(self, depth: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        blocks = [
            (nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8))
            for _ in range(depth)
        ]
        self.body = nn.Sequential(*(layer for block in blocks for layer in (*block, nn.ReLU())))
        self.last = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.last(self.body(self.first(images)).mean((2, 3)))
        return result


def steps(model: nn.Module, optimizer: rlsprune.RLS, count: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(count):
        images = torch.rand(4, 3, 8, 8, generator=generator).to(device, dtype)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def alone(layers: list[ReadyLayer], state: State) -> list[list[list[ReadyLayer]]]:
    return [[[layer]] for layer in layers]


def test_layers_of_other_sizes_share_what_has_no_size() -> None:
    """The small matrices of all layers are one; P and weights are those of steps layer by layer."""
    results, kernels = [], []
    for way in (rls.equal_layers, alone):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise((70, 90, 60, 60, 5)))).double()
        optimizer = rlsprune.RLS(model, lr=0.1, rank=8, forgetting=0.99)
        with pytest.MonkeyPatch.context() as patch, Kernels() as counted:
            patch.setattr(rls, "equal_layers", way)
            for _ in range(30):  # C is compressed twice
                optimizer.zero_grad()
                model(torch.rand(4, 70, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        results.append((model.state_dict(), [optimizer.inverse(str(number)) for number in range(4)]))
        kernels.append(counted.count)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    assert kernels[0] < 0.8 * kernels[1]


@pytest.mark.parametrize("poses", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"forgetting": 0.97, "weight_decay": 0.01},
        {"rank": None},
        {"rank": 4},
        {"frozen": "weight"},
        {"frozen": "bias"},
    ],
    ids=str,
)
def test_together_as_alone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], poses: bool) -> None:
    frozen = {**options}.pop("frozen", None)
    if poses:
        monkeypatch.setattr("rlsprune.optim.faults.host_waits", lambda device: True)
    results = []
    for way in ("together", "alone"):
        model = Repeated(3).double()
        for parameter in model.body.parameters():
            parameter.requires_grad_(frozen is None or getattr(model.body[4], frozen) is not parameter)
        optimizer = rlsprune.RLS(model, lr=0.2, **{key: options[key] for key in options if key != "frozen"})
        with monkeypatch.context() as patch:
            if way == "alone":
                patch.setattr(rls, "equal_layers", alone)
            steps(model, optimizer, 5)
        results.append((model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_a_layer_with_its_own_settings_has_its_own_step() -> None:
    """η of one layer moves that layer alone."""
    model, other = Repeated(3).double(), Repeated(3).double()
    optimizers = [rlsprune.RLS(network, lr=0.2) for network in (model, other)]
    slow = next(group for group in optimizers[1].param_groups if group["name"] == "body.4")
    slow["lr"] = 0.1
    for network, optimizer in zip((model, other), optimizers, strict=True):
        steps(network, optimizer, 1)
    start = Repeated(3).double()
    for index in (0, 4, 8):
        moved = [network.body[index].weight - start.body[index].weight for network in (model, other)]
        torch.testing.assert_close(moved[1], moved[0] * (0.5 if index == 4 else 1.0), rtol=1e-6, atol=1e-12)


class Kernels(TorchDispatchMode):
    """Counts the operations that compute: not those that only look at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_deeper_network_takes_no_more_kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(FaultWatch, "report", lambda self: None)
    counts = []
    for depth in (2, 7):
        model = Repeated(depth).to(device)
        optimizer = rlsprune.RLS(model, weight_decay=0.01)
        steps(model, optimizer, 1, device)
        model(torch.rand(4, 3, 8, 8, device=device)).square().mean().backward()
        with Kernels() as kernels:
            optimizer.step()
        counts.append(kernels.count)
    assert counts[0] == counts[1]


def held(optimizer: rlsprune.RLS) -> int:
    """Bytes of all storages behind the optimizer's state."""
    tensors = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("copied", [False, True])
def test_no_more_memory_is_held_than_is_used(copied: bool) -> None:
    """However often the layers that lie together change: frozen one after the other, some without a gradient."""
    model = Repeated(6, bias=False)
    optimizer = rlsprune.RLS(model, lr=0.2)
    steps(model, optimizer, 1)
    first = optimizer.state[model.body[0].weight]["inverse"]["C"]
    assert first.untyped_storage().nbytes() == 6 * first.nbytes
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    for index in (0, 4, 12):
        model.body[index].requires_grad_(False)
        steps(model, optimizer, 1)
        assert held(optimizer) == optimizer.memory_usage()["total"]
    model.body[4].requires_grad_(True)
    steps(model, optimizer, 1)
    assert held(optimizer) == optimizer.memory_usage()["total"]


def test_large_layers_are_stepped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_of_steps(Repeated(4)) == [1, 1, 4, 4]
    monkeypatch.setattr(
        "rlsprune.optim.layer_step._MOST_JOINED", 24 * 73 - 1
    )  # rows of C; 8 channels of 3×3, and the bias
    assert sizes_of_steps(Repeated(4)) == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("way", ["deepcopy", "state_dict"])
def test_copies_do_not_share_what_lies_together(way: str) -> None:
    model = Repeated(3)
    optimizer = rlsprune.RLS(model, lr=0.2)
    steps(model, optimizer, 2)
    if way == "deepcopy":
        twin, its_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin = Repeated(3)
        twin.load_state_dict(model.state_dict())
        its_optimizer = rlsprune.RLS(twin, lr=0.2)
        its_optimizer.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    steps(twin, its_optimizer, 2)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    steps(model, optimizer, 2)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_the_fault_named_is_the_first_in_the_network() -> None:
    """Though the layers after it are looked at together with those before."""
    model = Repeated(3)
    optimizer = rlsprune.RLS(model, lr=0.2)
    steps(model, optimizer, 1)
    model.body[1].register_forward_hook(lambda layer, args, output: output * float("nan"))
    with pytest.raises(FloatingPointError, match="not finite: the gradient of layer 'first'"):
        steps(model, optimizer, 1)
    spoilt = Repeated(3)
    optimizer = rlsprune.RLS(spoilt, lr=0.2)
    steps(spoilt, optimizer, 1)
    optimizer.state[spoilt.body[4].weight]["inverse"]["T"].mul_(1e6)
    with pytest.raises(FloatingPointError, match=r"not positive definite: P of layer 'body\.4'\. Weights"):
        steps(spoilt, optimizer, 1)


def sizes_of_steps(model: nn.Module) -> list[int]:
    """How many layers of equal size there are, for each size."""
    seen: list[int] = []
    prepare = LayerStep.prepare

    def watched(sizes: list[list[ReadyLayer]], state: State) -> LayerStep:
        seen.extend(map(len, sizes))
        return prepare(sizes, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStep, "prepare", watched)
        steps(model, rlsprune.RLS(model, lr=0.2), 1)
    return sorted(seen)
