"""Times of layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlsprune.model.layer_times import layer_times
from rlsprune.model.tensors import wait_for


class Partly(nn.Module):
    """One layer is called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.idle, self.last = (
            nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(2, 2), nn.Linear(3, 2)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(self.conv(x))).mean((2, 3)))


def test_every_layer_that_is_called_has_a_time_and_no_hook_stays() -> None:
    model = Partly().eval()
    times = layer_times(model, torch.rand(1, 3, 8, 8))
    assert times.keys() == {"conv", "norm", "last"}
    assert all(seconds > 0 for seconds in times.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_network_that_is_one_layer() -> None:
    assert layer_times(nn.Linear(4, 2), torch.rand(1, 4)).keys() == {""}


def test_the_clock_waits_for_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator is at hand: what is asked of torch is seen, and of layer_times that it asks."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    wait_for(torch.device("cpu"))
    assert not waited
    devices = [torch.device("mps", 0), torch.device("xpu"), torch.device("cuda", 1)]
    for device in devices:
        wait_for(device)
    assert waited == devices
    monkeypatch.setattr("rlsprune.model.layer_times.device_of", lambda *_: devices[0])
    layer_times(nn.Linear(4, 2), torch.rand(1, 4))
    assert waited[3:]
    assert set(waited[3:]) == {devices[0]}
