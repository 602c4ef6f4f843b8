"""Common parts of the benchmarks: a training step, the optimizers to compare, and a clock."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import _muon as torch_muon

import rlsprune
from rlsprune.app.config.losses import mean_squared_error

try:
    from pytorch_optimizer import SOAP, ScalableShampoo
except ImportError:
    SOAP = ScalableShampoo = None
try:
    from singd.optim.optimizer import SINGD
except ImportError:
    SINGD = None

CLASSES = 10


def train_step(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    images: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = mean_squared_error,
) -> Tensor:
    """Takes one full training step, and returns the loss before it."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    value = loss(model(images), labels)
    value.backward()
    for optimizer in optimizers:
        optimizer.step()
    return value.detach()


def clock() -> float:
    """Returns seconds. With one thread it is processor time, so that waiting for a busy core does not count."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True)
class Contender:
    """An optimizer to compare."""

    name: str
    build: Callable[[nn.Module, float], list[Optimizer]]
    """Function from a model and a learning rate to the optimizers that together train it."""
    default: float
    """The default learning rate of its paper or library."""
    grid: tuple[float, ...]
    """Three learning rates to choose from, the default among them."""


def contenders(muon_bfloat16: bool = False, rate: float = 1.0) -> list[Contender]:
    """Returns all installed optimizers, the reference (SGD) first.

    Args:
        muon_bfloat16: Whether torch's Muon keeps its bfloat16.
        rate: η of RLS.
    """
    rates = (0.3 * rate, rate, 3 * rate)
    found = [
        Contender("SGD momentum", _sgd, 0.1, (0.03, 0.1, 0.3)),
        Contender("RLS", _rls, rate, rates),
        Contender("RLS, P whole", partial(_rls, rank=None), rate, rates),
        Contender("AdamW", lambda model, lr: [torch.optim.AdamW(model.parameters(), lr=lr)], 1e-3, (3e-4, 1e-3, 3e-3)),
    ]
    if not muon_bfloat16:
        torch_muon._zeropower_via_newtonschulz = orthogonalise
    found.append(Contender("Muon" if muon_bfloat16 else "Muon (float32)", _muon, 1e-3, (1e-3, 5e-3, 2e-2)))
    if ScalableShampoo is None:
        warnings.warn("no Shampoo and SOAP: pip install -c constraints.txt pytorch-optimizer", stacklevel=2)
    else:
        found += [
            Contender(
                "Shampoo",
                lambda model, lr: [ScalableShampoo(model.parameters(), lr=lr)],
                1e-3,
                (1e-3, 0.1, 0.3),
            ),
            Contender("SOAP", lambda model, lr: [SOAP(model.parameters(), lr=lr)], 3e-3, (1e-3, 3e-3, 1e-2)),
        ]
    if SINGD is None:
        warnings.warn("no singd: pip install -c constraints.txt singd", stacklevel=2)
    else:
        found.append(Contender("singd", lambda model, lr: [SINGD(model, lr=lr)], 1e-3, (1e-3, 1e-2, 0.1)))
    return found


def _rls(model: nn.Module, lr: float, rank: int | None = 16) -> list[Optimizer]:
    """Makes RLS whose rate for parameters without P is at most η."""
    return [rlsprune.RLS(model, lr=lr, fallback_lr=min(0.1, lr), rank=rank)]


def _sgd(model: nn.Module, lr: float) -> list[Optimizer]:
    """Makes SGD with the momentum and weight decay that the paper gives its rivals."""
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)]


def _muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Makes Muon for hidden matrices, and AdamW for output layer, biases and convolutions, as its authors advise."""
    *hidden, output = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2] + [output]
    return [torch.optim.Muon(hidden, lr=lr), torch.optim.AdamW(rest)]


def orthogonalise(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """Computes Muon's Newton-Schulz iteration in the gradient's own dtype.

    torch runs it in bfloat16, which takes seconds per step on a CPU without instructions for it.
    """
    a, b, c = ns_coefficients
    X = grad.T if grad.size(0) > grad.size(1) else grad
    X = X / X.norm().clamp(min=eps)
    for _ in range(ns_steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if grad.size(0) > grad.size(1) else X


def state_bytes(optimizer: Optimizer) -> int:
    """Counts the memory that the optimizer keeps between steps: all tensors it reaches except the model's."""
    model = {p.untyped_storage().data_ptr() for group in optimizer.param_groups for p in group["params"]}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(vars(optimizer), set())}
    return sum(size for pointer, size in held.items() if pointer not in model)


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen or isinstance(thing, (nn.Module, nn.Parameter, type)):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        parts: Iterable[Any] = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        parts = thing
    else:
        parts = getattr(thing, "__dict__", {}).values()
    for part in parts:
        yield from _tensors(part, seen)
