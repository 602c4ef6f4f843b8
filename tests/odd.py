"""Networks, inputs and values that nobody expects, and what may come of them: a success, or an error of ours."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat, quantize_dynamic
from torch.nn.utils import parametrizations, prune

VALUES: list[Any] = [
    *(None, "", "x", b"x", 0, -1, 1, 2.5, float("nan"), float("inf"), -float("inf"), 10**30, True, 1j, object(), int),
    *([], {}, (), set(), [None], {"a": 1}, {1: 2}, {"params": float("nan")}, {"params": "x"}, {"flops": 2}, range(3)),
    *(torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.zeros(0)),
]
"""What an argument may be by mistake."""

# What Python raises where code did not expect a value, wherever it is raised.
_SLIPS = (AttributeError, IndexError, ZeroDivisionError, AssertionError, NotImplementedError, UnboundLocalError)


def outcome(action: Callable[[], object]) -> str | None:
    """What is wrong with what came of it, or None: it succeeded, or this package raised an error of its own."""
    try:
        action()
    except Exception as error:
        at = error.__traceback__
        assert at is not None
        while at.tb_next is not None:
            at = at.tb_next
        file, line = at.tb_frame.f_code.co_filename, at.tb_lineno
        statement = "".join(linecache.getline(file, number) for number in range(max(1, line - 8), line + 1))
        ours = "/rlsprune/" in file and "raise" in statement and not isinstance(error, _SLIPS)
        return None if ours and " " in str(error) else f"{type(error).__name__} of {file}:{line}: {error}"
    return None


def traits(model: nn.Module) -> dict[str, Any]:
    """All that an action which fails must leave as it was."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        seen[f"module {name}"] = (module.training, *map(len, hooks))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[name] = (id(tensor), tensor.requires_grad)
        if not nn.parameter.is_lazy(tensor) and not tensor.is_meta:
            values = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
            seen[name] += (tuple(tensor.shape), values.clone().tolist().__repr__())
    return seen


class Odd(nn.Module):
    """A forward that is a function."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass
class Output:
    logits: Tensor
    rest: object = None


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def rows() -> Tensor:
    return torch.rand(4, 8)


def _changed(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    network = mlp()
    with torch.no_grad():
        change(network)
    return network


def _normed(**options: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **options), nn.ReLU(), nn.Linear(16, 3))


def _made_in_inference() -> nn.Module:
    with torch.inference_mode():
        return mlp()


def _qat() -> nn.Module:
    network = nn.Sequential(torch.ao.quantization.QuantStub(), *mlp(), torch.ao.quantization.DeQuantStub()).train()
    network.qconfig = get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return prepare_qat(network)


def _fails_after(runs: int) -> nn.Module:
    left = [runs]

    def forward(self: Any, x: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the file is gone")
        return self.m(x)  # type: ignore[no-any-return]

    return Odd(forward, m=mlp())


def _raises(self: Any, x: Tensor) -> Tensor:
    raise KeyError(x.shape)


def _tied() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(8, 3))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "empty": lambda: (nn.Sequential(), rows()),
    "one layer": lambda: (nn.Linear(8, 3), rows()),
    "no outputs in the middle": lambda: (nn.Sequential(nn.Linear(8, 0), nn.ReLU(), nn.Linear(0, 3)), rows()),
    "no inputs": lambda: (nn.Sequential(nn.Linear(0, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(4, 0)),
    "an empty batch": lambda: (mlp(), torch.rand(0, 8)),
    "no batch": lambda: (mlp(), torch.rand(8)),
    "other inputs": lambda: (mlp(), torch.rand(4, 9)),
    "whole numbers": lambda: (mlp(), torch.randint(5, (4, 8))),
    "sparse inputs": lambda: (mlp(), rows().to_sparse()),
    "nested inputs": lambda: (mlp(), torch.nested.nested_tensor([torch.rand(3, 8), torch.rand(2, 8)])),
    "NaN in the inputs": lambda: (mlp(), rows() * float("nan")),
    "NaN in the weights": lambda: (_changed(lambda m: m[0].weight[0].fill_(float("nan"))), rows()),
    "infinite weights": lambda: (_changed(lambda m: m[2].weight[0].fill_(float("inf"))), rows()),
    "no weights but zeros": lambda: (_changed(lambda m: [p.zero_() for p in m.parameters()]), rows()),
    "half": lambda: (mlp().half(), rows().half()),
    "complex": lambda: (mlp().to(torch.complex64), rows().to(torch.complex64)),
    "meta": lambda: (mlp().to("meta"), rows().to("meta")),
    "a part of it meta": lambda: (_changed(lambda m: m[2].to("meta")), rows()),
    "lazy": lambda: (nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3)), rows()),
    "made in inference mode": lambda: (_made_in_inference(), rows()),
    "scripted": lambda: (torch.jit.script(mlp()), rows()),
    "compiled": lambda: (torch.compile(mlp(), backend="eager"), rows()),
    "data parallel": lambda: (nn.DataParallel(mlp()), rows()),
    "frozen": lambda: (mlp().requires_grad_(False), rows()),
    "spectral norm": lambda: (_changed(lambda m: parametrizations.spectral_norm(m[2])), rows()),
    "weight norm": lambda: (_changed(lambda m: parametrizations.weight_norm(m[0])), rows()),
    "masked by torch": lambda: (_changed(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)), rows()),
    "quantized": lambda: (quantize_dynamic(mlp(), {nn.Linear}), rows()),
    "quantized while it trains": lambda: (_qat(), rows()),
    "tied": lambda: (_tied(), rows()),
    "entries in one place": lambda: (
        _changed(lambda m: setattr(m[0], "weight", nn.Parameter(torch.rand(1, 8).expand(16, 8)))),
        rows(),
    ),
    "negative variances": lambda: (_changed_norm(), rows()),
    "a norm without statistics": lambda: (_normed(track_running_stats=False), rows()),
    "such a norm and one row": lambda: (_normed(track_running_stats=False), torch.rand(1, 8)),
    "mapped over rows": lambda: (Odd(lambda self, x: torch.vmap(self.m)(x), m=mlp()), rows()),
    "sparse outputs": lambda: (Odd(lambda self, x: self.m(x).to_sparse(), m=mlp()), rows()),
    "nested outputs": lambda: (
        Odd(lambda self, x: torch.nested.nested_tensor([*self.m(x)]), m=mlp()),
        rows(),
    ),
    "returns nothing": lambda: (Odd(lambda self, x: [self.m(x), None][1], m=mlp()), rows()),
    "returns a dataclass": lambda: (Odd(lambda self, x: Output(self.m(x)), m=mlp()), rows()),
    "returns a dict": lambda: (Odd(lambda self, x: {"a": self.m(x), "b": 3, "c": None}, m=mlp()), rows()),
    "returns class numbers": lambda: (Odd(lambda self, x: self.m(x).argmax(-1), m=mlp()), rows()),
    "raises": lambda: (Odd(_raises, m=mlp()), rows()),
    "raises later": lambda: (_fails_after(3), rows()),
    "by keyword": lambda: (Odd(lambda self, *, x, y=None: self.m(x), m=mlp()), {"x": rows()}),
    "a keyword is missing": lambda: (Odd(lambda self, x, *, y: self.m(x) + y, m=mlp()), rows()),
    "no tensor": lambda: (Odd(lambda self: self.m(torch.ones(4, 8)), m=mlp()), ()),
}
"""A network and its example inputs."""


def _changed_norm() -> nn.Sequential:
    network = _normed()
    network[1].running_var.fill_(-1.0)  # type: ignore[union-attr, operator]
    return network
