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
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from prune.scenes import ACTIONS, made
from rlsprune.model.interrupts import interruptible, stop_if_interrupted, uninterrupted


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
        undone += scene.undone(before, after, f"{name}, interrupt {number} at line {line}")
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
    assert scene.pruner.gate_level == 1.05
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
    assert pruner.gate_level == 1.05
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
