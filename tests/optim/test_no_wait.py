"""On an accelerator a step never waits for the device.

The meta device stands for it: its tensors have shapes and no values, so that whatever would have to wait for a value
(`.item()`, `.cpu()`, `nonzero`, a tensor in an `if`) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import rlsprune
from networks import SHAPES, cnn, fnn
from rlsprune.distributed.ranks import Ranks
from rlsprune.optim.faults import FaultWatch
from rlsprune.optim.layer_step import LayerStep

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "forgetting": {"forgetting": 0.99},
    "P whole": {"rank": None},
    "compressed": {"rank": 2},
    "decay": {"weight_decay": 1e-3},
}


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step before found is looked at when the next one begins; that look is not part of the step."""
    monkeypatch.setattr(FaultWatch, "report", lambda self: None)


def steps(make: Callable[[], nn.Module], **options: Any) -> rlsprune.RLS:
    model = nn.Sequential(make(), nn.BatchNorm1d(3)).to("meta")
    optimizer = rlsprune.RLS(model, **options)
    statistics = rlsprune.InputStatistics(model)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.rand(4, *SHAPES[make], device="meta")).square().mean().backward()
        optimizer.step()
    statistics.close()
    return optimizer


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [fnn, cnn])
def test_a_step_never_waits(make: Any, options: str) -> None:
    assert steps(make, **OPTIONS[options]).memory_usage()["inverse"] > 0


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As rank 0 of two, of which the other says nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, value])
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_step_of_several_ranks_never_waits() -> None:
    optimizer = steps(cnn)
    assert optimizer.ranks is not None
    assert optimizer.memory_usage()["inverse"] > 0


@pytest.mark.parametrize(
    "look", [lambda t: t.item(), lambda t: t.cpu(), lambda t: t.nonzero(), bool], ids=["item", "cpu", "nonzero", "bool"]
)
def test_a_step_that_waited_would_be_noticed(monkeypatch: pytest.MonkeyPatch, look: Callable[[Tensor], Any]) -> None:
    apply = LayerStep.apply

    def waiting(self: LayerStep, *args: Any) -> None:
        look(self.h.sum())
        apply(self, *args)

    monkeypatch.setattr(LayerStep, "apply", waiting)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        steps(fnn)
