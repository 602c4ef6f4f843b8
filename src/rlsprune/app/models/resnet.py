"""The residual networks for CIFAR images."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ResNet"]


class ResNet(nn.Sequential):
    """ResNet-20, -32, … -110 of He et al. (2016): three stages of 16, 32 and 64 channels, shortcuts by projection.

    Args:
        depth: Number of layers, 6·n + 2 for n blocks of two convolutions in each stage.
        classes: Number of outputs.
    """

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth={depth} is not valid: three stages of n blocks make 6·n + 2 layers, as 20 or 56")
        layers: list[nn.Module] = [*_normed(3, 16), nn.ReLU()]
        inputs = 16
        for width in (16, 32, 64):
            for number in range((depth - 2) // 6):
                layers.append(_Block(inputs, width, 2 if number == 0 and width > 16 else 1))
                inputs = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class _Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_normed(inputs, outputs, 3, stride), nn.ReLU(), *_normed(outputs, outputs))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _normed(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
