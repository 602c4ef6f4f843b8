"""Whatever is given: it works, or an error of this package names what is wrong, and the model is as it was."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import odd
import rlsprune
from rlsprune.model.calls import as_call, output_tensors


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def attempt(what: str, action: Callable[[], object], model: nn.Module | None = None, *, keeps: bool = False) -> bool:
    """Whether it succeeded; a failure, or an action that ``keeps`` the model in any case, has changed nothing."""
    done: list[object] = []
    before = None if model is None else odd.traits(model)
    wrong = odd.outcome(lambda: done.append(action()))
    assert wrong is None, f"{what}: {wrong}"
    if model is not None and (keeps or not done):
        assert odd.traits(model) == before, what
    return bool(done)


@pytest.mark.parametrize("name", odd.NETWORKS)
@pytest.mark.parametrize("make", [rlsprune.RLS, torch.optim.SGD], ids=["rls", "sgd"])
def test_pruner(name: str, make: Any) -> None:
    model, example = odd.NETWORKS[name]()
    made: list[Any] = []
    if make is rlsprune.RLS:
        attempt("RLS", lambda: made.append(rlsprune.RLS(model, lr=0.1)), model)
    elif any(p.requires_grad for p in model.parameters()):
        made.append(make(model.parameters(), lr=0.01))
    if not made or not attempt("Pruner", lambda: made.append(rlsprune.Pruner(model, made[0], example)), model):
        return
    optimizer, pruner = made
    if not _trains(model, example, optimizer):
        attempt("calibrate", lambda: pruner.calibrate([example]), model)
    attempt("preview", pruner.preview, model, keeps=True)
    attempt("prune", pruner.prune, model)
    attempt("finish", pruner.finish, model)


def _trains(model: nn.Module, example: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps of training succeed; what torch says of them is between torch and the user."""
    args, kwargs = as_call(example)
    try:
        for _ in range(2):
            losses = [out.abs().square().mean() for out in output_tensors(model(*args, **kwargs)) if out.requires_grad]
            if not losses:
                return False
            torch.stack(losses).sum().backward()
            optimizer.step()
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", odd.NETWORKS)
def test_all_else(name: str, tmp_path: Path) -> None:
    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        return odd.NETWORKS[name]()

    model, example = fresh()
    attempt("shrink", lambda: rlsprune.shrink(model, [example, example], target={"params": 0.5}), model)
    model, example = fresh()
    attempt("profile", lambda: rlsprune.profile(model, example, min_seconds=0), model, keeps=True)
    attempt("InputStatistics", lambda: rlsprune.InputStatistics(model).close(), model, keeps=True)
    attempt("strip_inputs", lambda: rlsprune.strip_inputs(model), model, keeps=True)
    if attempt("save", lambda: rlsprune.save(model, tmp_path / "model.safetensors"), model, keeps=True):
        model, _ = fresh()
        attempt("load", lambda: rlsprune.load(tmp_path / "model.safetensors", model), model)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", odd.NETWORKS)
def test_exports(name: str, tmp_path: Path) -> None:
    model, example = odd.NETWORKS[name]()
    attempt("onnx", lambda: rlsprune.export_onnx(model, example, tmp_path / "model.onnx"), model, keeps=True)
    attempt("program", lambda: rlsprune.export_program(model, example, tmp_path / "model.pt2"), model, keeps=True)


def _pruner(model: nn.Module, **changes: Any) -> rlsprune.Pruner:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = rlsprune.Pruner(model, optimizer, odd.rows(), **{"warmup_epochs": 0, **changes})
    pruner.calibrate([odd.rows()])
    return pruner


def _step(model: nn.Module, **changes: Any) -> None:
    with contextlib.closing(rlsprune.RLS(model, **changes)) as optimizer:
        model(odd.rows()).square().mean().backward()
        optimizer.step()


def _shrink(model: nn.Module, batches: Any = None, **changes: Any) -> object:
    given = [torch.rand(16, 8)] if batches is None else batches
    return rlsprune.shrink(model, given, **{"target": {"params": 0.7}, **changes})


def _event(model: nn.Module, name: str, value: Any) -> None:
    with contextlib.closing(_pruner(model, **{name: value})) as pruner:
        pruner.step(1.0)


# What the user's own functions raise is the user's: none of those is given here.
CALLS: dict[str, Callable[[nn.Module, str, Any], object]] = {
    "Pruner": _event,
    "RLS": lambda m, name, value: _step(m, **{name: value}),
    "shrink": lambda m, name, value: _shrink(m, **{name: value}),
    "InputStatistics": lambda m, name, value: rlsprune.InputStatistics(m, **{name: value}),
}
NAMES = {
    call: [n for n, p in inspect.signature(getattr(rlsprune, call)).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for call in CALLS
}


VALUES = [value for value in odd.VALUES if not callable(value)]


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in NAMES.items() for name in names])
def test_arguments(call: str, name: str) -> None:
    for value in VALUES:
        model = odd.mlp()
        attempt(f"{call}({name}={value!r})", lambda: CALLS[call](model, name, value), model)  # noqa: B023


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_methods_and_functions_are_given(value: Any, tmp_path: Path) -> None:
    model, path = odd.mlp(), tmp_path / "model.safetensors"
    pruner = _pruner(model)
    rlsprune.save(model, path)
    optimizer = rlsprune.RLS(model)
    state: dict[str, Any] = pruner.state_dict()
    actions: dict[str, Callable[[], object]] = {
        "Pruner(optimizer)": lambda: rlsprune.Pruner(model, value, odd.rows()),
        "Pruner(example_inputs)": lambda: rlsprune.Pruner(model, optimizer, value),
        "calibrate": lambda: pruner.calibrate(value),
        "calibrate a batch": lambda: pruner.calibrate([value]),
        "follow": lambda: pruner.follow(value),
        **{f"load {key}": lambda key=key: pruner.load_state_dict({**state, key: value}) for key in state},  # type: ignore[misc]
        "load": lambda: pruner.load_state_dict(value),
        "inverse": lambda: optimizer.inverse(value),
        "RLS.load_state_dict": lambda: optimizer.load_state_dict(value),
        "RLS.state": lambda: optimizer.load_state_dict({**optimizer.state_dict(), "state": value}),
        "RLS.param_groups": lambda: optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": value}),
        "RLS(model)": lambda: rlsprune.RLS(value),
        "profile(inputs)": lambda: rlsprune.profile(model, value, min_seconds=0),
        "profile(before)": lambda: rlsprune.profile(model, odd.rows(), value, min_seconds=0),
        "profile(min_seconds)": lambda: rlsprune.profile(
            model, odd.rows(), min_seconds=0 if type(value) is int else value
        ),
        "save(model)": lambda: rlsprune.save(value, path),
        "save(path)": lambda: rlsprune.save(model, value),
        "save(metadata)": lambda: rlsprune.save(model, path, value),
        "load(path)": lambda: rlsprune.load(value, model),
        "load(into)": lambda: rlsprune.load(path, value),
        "export_onnx(path)": lambda: rlsprune.export_onnx(model, odd.rows(), value),
        "export_program(path)": lambda: rlsprune.export_program(model, odd.rows(), value),
        "quantize_onnx": lambda: rlsprune.quantize_onnx(value, path, value),
    }
    if not isinstance(value, dict) and value is not None:  # with these the export is made, which takes a second
        actions["export_onnx(metadata)"] = lambda: rlsprune.export_onnx(
            model, odd.rows(), tmp_path / "model.onnx", metadata=value
        )
    for what, action in actions.items():
        if not (isinstance(value, str) and "path" in what):
            attempt(f"{what}: {value!r}", action, model)
    for what, batches in {"all": value, "one": [value], "the second": [torch.rand(16, 8), value]}.items():
        model = odd.mlp()
        attempt(f"shrink {what} {value!r}", lambda: _shrink(model, batches), model)  # noqa: B023
    model = odd.mlp()
    attempt(f"shrink target {value!r}", lambda: _shrink(model, [(torch.rand(16, 8), value)], recovery_epochs=1), model)
    pruner = _pruner(odd.mlp())
    attempt(f"step({value!r})", lambda: pruner.step(value), pruner.model)


RETURNED: dict[str, Callable[[nn.Module, Callable[..., Any]], object]] = {
    "held_out_loss": lambda m, gives: _pruner(m, held_out_loss=gives).step(1.0),
    "criterion": lambda m, gives: _pruner(m, criterion=gives).step(1.0),
    "score": lambda m, gives: _shrink(m, max_drop=1.0, score=gives),
    "loss": lambda m, gives: _shrink(m, _labelled(), recovery_epochs=1, loss=gives),
    "optimizer": lambda m, gives: _shrink(m, _labelled(), recovery_epochs=1, optimizer=gives),
}
SPECIAL: dict[str, list[Callable[..., Any]]] = {
    "criterion": [lambda group: [[0.0] * group.size], lambda group: [torch.zeros(group.size, dtype=torch.cfloat)]],
    "loss": [lambda outputs, _: outputs, lambda outputs, _: outputs.detach().sum()],
    "optimizer": [lambda network: torch.optim.LBFGS(network.parameters())],
}


def _labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.rand(16, 8), torch.randint(3, (16,)))]


@pytest.mark.parametrize("name", RETURNED)
def test_what_functions_of_the_user_return(name: str) -> None:
    plain: list[Callable[..., Any]] = [lambda *_, value=value: value for value in VALUES]
    for gives in [*plain, *SPECIAL.get(name, [])]:
        model = odd.mlp()
        wrong = odd.outcome(lambda: RETURNED[name](model, gives))  # noqa: B023
        assert wrong is None, wrong
        assert model(odd.rows()).shape == (4, 3)
