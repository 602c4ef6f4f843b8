"""Events agree with the slow reference of Algorithm 1: the same units go, and weights, P and Ψ are the same after."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from networks import SHAPES, cnn, fnn, target
from reference.pruning import install, prune, snapshot
from reference.training import ReferenceRLS, paper_loss
from rlsprune.statistics.inputs import InputStatistics
from rlsprune.statistics.inverse import Inverse

CASES = [
    {"criterion": "rls", "inverse": "slice", "compensate": False},
    {"criterion": "rls", "inverse": "schur", "compensate": True},
    {"criterion": "rls", "inverse": "reset", "compensate": True},
    {"criterion": "rls-paper", "inverse": "slice", "compensate": False},
    {"criterion": "rls-paper", "inverse": "schur", "compensate": True, "min_channels": 5},
]


@pytest.mark.parametrize("make", [fnn, cnn])
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_choices_weights_and_p_over_several_events(make: Callable[[], nn.Sequential], options: dict[str, Any]) -> None:
    model = make().double()
    reference = ReferenceRLS(copy.deepcopy(model), lr=0.3)
    optimizer = rlsprune.RLS(model, lr=0.3, rank=None)
    example = torch.rand(2, *SHAPES[make]).double()
    pruner = rlsprune.Pruner(model, optimizer, example, ratio=0.5, statistics="training", **options)
    kept: list[int] | None = None
    removals = 0
    for event_number in range(4):
        generator = torch.Generator().manual_seed(event_number)
        for _ in range(8):
            inputs = torch.rand(16, *SHAPES[make], generator=generator).double()
            optimizer.zero_grad()
            paper_loss(model(inputs), target(inputs)).backward()
            optimizer.step()
            reference.step(inputs if kept is None else inputs[:, kept], target(inputs), paper_loss)
        state, chain = snapshot(reference, kept)
        expected = prune(state, chain, 0.5, **options)
        install(state, reference)
        kept = state.kept_inputs
        event = pruner.prune()
        # The reference names a layer by what its input lost, we by the layer that makes it.
        producers = ["input", *(name for _, name in chain[:-1])]
        removed = {made: expected[name] for made, (_, name) in zip(producers, chain, strict=True) if expected[name]}
        assert (event.removed if event else {}) == removed
        removals += sum(map(len, removed.values()))
        for name, layer in reference.layers.items():
            ours = model.get_submodule(name)
            torch.testing.assert_close(ours.weight.data, layer.weight.data, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(ours.bias.data, layer.bias.data, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(optimizer.inverse(name), reference.P[name], rtol=1e-6, atol=1e-8)
            velocity, _ = reference.velocity(name)
            torch.testing.assert_close(optimizer.state[ours.weight]["velocity"], velocity, rtol=1e-6, atol=1e-8)
        if kept is not None:
            assert pruner.kept_inputs.tolist() == kept
    assert removals > 10


def test_an_event_keeps_the_statistics_of_one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(12, 12), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), *hidden, nn.Linear(12, 2))
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(2, 8), ratio=0.3)
    pruner.calibrate([torch.rand(64, 8)])
    made: list[weakref.ref[object]] = []
    alive: list[int] = []
    inverses = InputStatistics.inverses

    def watched(self: InputStatistics, name: str) -> list[Inverse]:
        alive.append(sum(P() is not None for P in made))
        found = inverses(self, name)
        made.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(InputStatistics, "inverses", watched)
    assert pruner.prune() is not None
    assert len(made) == 8
    assert max(alive) <= 1
