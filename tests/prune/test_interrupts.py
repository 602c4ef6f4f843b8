"""Ctrl-C at any moment: everything is as it was before, or as it is after; nothing is in between.

A signal is sent to this very process, at a random line of Python (that of torch included) or after a random time.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rlsprune
from rlsprune.model.interrupts import interruptible, stop_if_interrupted, uninterrupted

EXAMPLE = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(96, 10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3)),
    )
    model[6].eval()  # a mode of its own
    model[7].bias.requires_grad_(False)
    return model


def plain(value: Any) -> Any:
    """Comparable by value, bit for bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass
class Scene:
    """A network in training."""

    folder: Path
    model: nn.Module = field(default_factory=network)
    optimizer: Any = None
    pruner: Any = None
    average: Any = None

    def trained(self) -> Scene:
        self.optimizer = rlsprune.RLS(self.model)
        self.pruner = rlsprune.Pruner(
            self.model, self.optimizer, EXAMPLE, ratio=0.5, warmup_epochs=0, patience=1, held_out_loss=self.loss
        )
        self.average = AveragedModel(self.model)
        self.pruner.follow(self.average)
        self.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.backward()
        return self

    def pruned(self) -> Scene:
        self.trained().pruner.step(1.0)
        self.backward()
        self.optimizer.step()
        return self

    def inputs(self) -> Tensor:
        return torch.rand(32, 2, 6, 6, generator=torch.Generator().manual_seed(1))

    def loss(self) -> float:
        return float(self.model(self.inputs()).square().mean())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs()).square().mean().backward()

    def facts(self) -> Any:
        """All that a user could notice."""
        model, optimizer, pruner = self.model, self.optimizer, self.pruner
        return plain(
            {
                "state": dict(model.state_dict()),
                "average": None if self.average is None else dict(self.average.state_dict()),
                "layers": [str(module) for module in model.modules()],
                "modes": [module.training for module in model.modules()],
                "hooks": [
                    [len(hooks) for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
                    for m in model.modules()
                ],
                "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
                "optimizer": None if optimizer is None else optimizer.state_dict(),
                "recorded": None if optimizer is None else [r.mean for r in optimizer._recorders.values()],
                "pruner": None if pruner is None else pruner.state_dict(),
                "groups": None if pruner is None else [(group.name, group.size) for group in pruner.groups],
                "sampling": None if pruner is None else pruner._operation._sample.active,
                "torch": [torch.is_grad_enabled(), torch.get_rng_state()],
                "files": {path.name: path.read_bytes() for path in self.folder.iterdir()},
                "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            }
        )


def optimizer_made(scene: Scene) -> None:
    scene.optimizer = rlsprune.RLS(scene.model)


def pruner_made(scene: Scene) -> None:
    scene.pruner = rlsprune.Pruner(scene.model, torch.optim.SGD(scene.model.parameters(), lr=0.1), EXAMPLE)


def saved(scene: Scene) -> Scene:
    """A fresh network, and the file of a pruned one."""
    rlsprune.save(scene.pruned().model, scene.folder / "model.safetensors")
    return Scene(scene.folder)


@cache
def saved_states() -> tuple[Any, Any, Any]:
    scene = Scene(Path(os.devnull)).pruned()
    return scene.model.state_dict(), scene.optimizer.state_dict(), scene.pruner.state_dict()


def unloaded(scene: Scene) -> Scene:
    """The network of a checkpoint, with its optimizer and pruner still to be loaded."""
    scene.pruned()
    scene.pruner.close()
    scene.optimizer.close()
    scene.optimizer, scene.average = rlsprune.RLS(scene.model), AveragedModel(scene.model)
    scene.pruner = rlsprune.Pruner(scene.model, scene.optimizer, EXAMPLE)
    scene.pruner.follow(scene.average)
    return scene


Make, Act = Callable[[Scene], Scene], Callable[[Scene], Any]
ACTIONS: dict[str, tuple[Make, Act]] = {
    "step of RLS": (Scene.trained, lambda scene: scene.optimizer.step()),
    "step that prunes": (Scene.trained, lambda scene: scene.pruner.step(1.0)),
    "prune": (Scene.trained, lambda scene: scene.pruner.prune()),
    "preview": (Scene.trained, lambda scene: scene.pruner.preview()),
    "roll-back": (Scene.pruned, lambda scene: scene.pruner.step(9.0)),
    "finish": (Scene.pruned, lambda scene: scene.pruner.finish()),
    "save": (Scene.trained, lambda scene: scene.pruner.save(scene.folder / "model.safetensors")),
    "load": (saved, lambda scene: rlsprune.load(scene.folder / "model.safetensors", scene.model)),
    "load of RLS": (unloaded, lambda scene: scene.optimizer.load_state_dict(saved_states()[1])),
    "load of Pruner": (unloaded, lambda scene: scene.pruner.load_state_dict(saved_states()[2])),
    "RLS": (lambda scene: scene, optimizer_made),
    "Pruner": (lambda scene: scene, pruner_made),
}


class AtLine:
    """Sends the signal at the n-th line that is executed."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


class AfterTime:
    """Sends the signal from a thread."""

    def __init__(self, seconds: float) -> None:
        self.thread, self.done = threading.Thread(target=self.send, args=(seconds,)), threading.Event()

    def send(self, seconds: float) -> None:
        if not self.done.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def made(name: str, folder: Path) -> Scene:
    folder.mkdir()
    return ACTIONS[name][0](Scene(folder))


def attack(name: str, folder: Path, tries: int) -> int:
    """Interrupts an action many times; returns how often it was undone."""
    rng, act = random.Random(name), ACTIONS[name][1]
    scene = made(name, folder / "counted")
    lines = AtLine(-1)
    with lines:
        act(scene)
    scene = made(name, folder / "whole")
    before, started = scene.facts(), time.perf_counter()
    act(scene)
    seconds, after = time.perf_counter() - started, scene.facts()
    undone = 0
    for number in range(tries):
        scene = made(name, folder / str(number))
        assert scene.facts() == before
        # Close to the end more often than chance has it: that is where the commit is.
        line = rng.randint(1, -lines.left) if number % 4 else -lines.left - rng.randint(0, 300)
        sender = AtLine(max(line, 1)) if number % 3 else AfterTime(rng.uniform(0, seconds))
        try:
            with sender:
                act(scene)
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        gc.collect()
        facts = scene.facts()
        wrong = {key for key in facts if facts[key] not in (before[key], after[key])}
        assert facts in (before, after), f"{name}, interrupt {number} at line {line}: {wrong or 'some of each'}"
        undone += facts == before
    return undone


@pytest.mark.parametrize("name", ACTIONS)
def test_nothing_is_in_between(name: str, tmp_path: Path) -> None:
    attack(name, tmp_path, 5)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIONS)
def test_nothing_is_in_between_a_thousand_times(name: str, tmp_path: Path) -> None:
    attack(name, tmp_path, 1000 // len(ACTIONS) + 1)


def test_an_event_stops_soon_and_is_undone(tmp_path: Path) -> None:
    scene = made("prune", tmp_path / "scene")
    before, calls = scene.facts(), []

    def loss() -> float:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    scene.pruner.held_out_loss = loss
    with pytest.raises(KeyboardInterrupt):
        scene.pruner.prune()
    assert len(calls) == 2
    assert scene.facts() == before


def test_on_prune_comes_after_the_event(tmp_path: Path) -> None:
    scene = made("prune", tmp_path / "scene")
    seen: list[int] = []

    def on_prune(event: rlsprune.PruneEvent) -> None:
        seen.append(len(scene.pruner.history))
        raise OSError("no space for the log")

    scene.pruner._on_prune = on_prune
    with pytest.raises(OSError, match="no space"):
        scene.pruner.step(1.0)
    assert seen == [1]
    assert scene.pruner.gate_level == 1.0
    assert not scene.pruner.recovered


def test_a_warning_that_is_an_error_loses_no_epoch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    pruner = rlsprune.Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(1, 4), ratio=0.01, warmup_epochs=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="nothing was pruned"):
            pruner.step(1.0)
    assert pruner.gate_level == 1.0
    assert pruner.state_dict()["gate"]["epoch"] == 1


def test_held_back_once_and_only_where_it_can_come() -> None:
    before, order = signal.getsignal(signal.SIGINT), list[str]()

    def handler(number: int, frame: FrameType | None) -> None:
        order.append("handled")

    signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            order.append("inner block done")
            stop_if_interrupted()
            order.append("asked")
            with interruptible():
                signal.raise_signal(signal.SIGINT)
            order.append("outer block done")
        assert signal.getsignal(signal.SIGINT) is handler
        assert order == ["inner block done", "handled", "asked", "handled", "outer block done"]
        stop_if_interrupted()

        def elsewhere() -> None:
            with uninterrupted(), interruptible():
                order.append(str(signal.getsignal(signal.SIGINT) is handler))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert order[-1] == "True"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
