"""The small VGG of the paper's second and third experiments."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rlsprune.app.models.norm import slimming_norm

__all__ = ["MiniVGG"]

_POOL = None
_PLAN = (64, 64, _POOL, 128, 128, _POOL, 256, _POOL)


class MiniVGG(nn.Sequential):
    """Convolutions 64, 64, pool, 128, 128, pool, 256, pool, then fully-connected 1024 and the classes.

    All convolutions are 3×3 with stride 1 and padding 1. A ReLU follows every hidden layer. The layers are called
    ``conv1`` … ``conv5``, ``fc1`` and ``fc2``, as in the paper's tables.

    Args:
        classes: Number of outputs.
        batch_norm: Whether a batch norm follows each hidden layer, as net slimming needs.
        image_size: Height and width of the images, a multiple of 8.
        channels: Number of colour channels of the images.
    """

    def __init__(self, classes: int = 10, batch_norm: bool = False, image_size: int = 32, channels: int = 3) -> None:
        if image_size < 8 or image_size % 8:
            raise ValueError(f"image_size={image_size} is not valid: three poolings need a multiple of 8")
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        number = pools = 0
        for width in _PLAN:
            if width is _POOL:
                pools += 1
                parts[f"pool{pools}"] = nn.MaxPool2d(2)
                continue
            number += 1
            parts[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            if batch_norm:
                parts[f"bn{number}"] = slimming_norm(nn.BatchNorm2d(width))
            parts[f"relu{number}"] = nn.ReLU()
            channels = width
        parts["flatten"] = nn.Flatten()
        parts["fc1"] = nn.Linear(channels * (image_size // 8) ** 2, 1024)
        if batch_norm:
            parts[f"bn{number + 1}"] = slimming_norm(nn.BatchNorm1d(1024))
        parts[f"relu{number + 1}"] = nn.ReLU()
        parts["fc2"] = nn.Linear(1024, classes)
        super().__init__(parts)
