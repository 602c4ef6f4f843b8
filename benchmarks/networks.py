"""The networks of the benchmarks, for images of 32×32 pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.common import CLASSES
from rlsprune.app.models import MiniVGG


def mini_vgg() -> nn.Sequential:
    """Builds the paper's small VGG, in the memory format in which its convolutions are faster."""
    return MiniVGG().to(memory_format=torch.channels_last)


def _normed(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU() if act else nn.Identity())


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and projection around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.body = nn.Sequential(
            *([_normed(inputs, hidden, 1)] if expand > 1 else []),
            _normed(hidden, hidden, 3, stride, groups=hidden),
            _normed(hidden, outputs, 1, act=False),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output."""
        out: Tensor = self.body(x)
        return x + out if self.residual else out


def mobilenet() -> nn.Sequential:
    """Builds MobileNetV2 at its full width, with the strides that 32×32 images allow."""
    plan = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: list[nn.Module] = [_normed(3, 32)]
    inputs = 32
    for expand, outputs, count, stride in plan:
        for number in range(count):
            layers.append(InvertedResidual(inputs, outputs, stride if number == 0 else 1, expand))
            inputs = outputs
    layers += [_normed(inputs, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers)
