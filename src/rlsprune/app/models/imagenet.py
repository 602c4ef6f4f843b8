"""Well-known networks at ImageNet size, for planning, with their layers and sizes and untrained weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["resnet50", "vgg16", "vit_large"]

_CLASSES = 1000


def vgg16() -> nn.Sequential:
    """Builds VGG-16 for 3×224×224 images (Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, _CLASSES))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_normed(inputs, width, 1, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride),
            nn.ReLU(),
            *_normed(width, outputs, 1, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _normed(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Sequential:
    """Builds ResNet-50 for 3×224×224 images (He et al., 2016), with the stride in the 3×3 convolutions."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            layers.append(_Bottleneck(inputs, width, 2 if number == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class _VisionTransformer(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, patch: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        outputs: Tensor = self.head(self.blocks(tokens)[:, 0])
        return outputs


def vit_large() -> nn.Module:
    """Builds ViT-L/16 for 3×224×224 images (Dosovitskiy et al., 2021)."""
    return _VisionTransformer(width=1024, depth=24, heads=16, patch=16, size=224)
