"""Small networks, one for each way in which channels hang together, with an example of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from rlsprune.graph import ChannelGraph, Group, Member, plan_cuts
from rlsprune.graph.layers import axis_of
from rlsprune.model.sizes import is_experts
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts


@dataclass(frozen=True)
class Specimen:
    """A network and what is known about it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of its input, batch first."""
    groups: dict[str, int]
    """Name → units of every group that can be pruned."""
    skipped: tuple[str, ...] = ()
    """Names that must be reported as left alone (the output layer is always)."""

    def model(self, seed: int = 0) -> nn.Module:
        """The network with random weights and, so that no mistake hides, random normalisation statistics."""
        torch.manual_seed(seed)
        model = self.make()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 1.5)
        return model

    def inputs(self, seed: int = 1, batch: int | None = None) -> Tensor:
        """Random input."""
        shape = (batch, *self.shape[1:]) if batch else self.shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fnn() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Dropout(0.1), nn.Linear(10, 3)
    )


def vgg(batch_norm: bool) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU()]

    features = [*block(3, 8), *block(8, 8), nn.MaxPool2d(2), *block(8, 12), nn.MaxPool2d(2)]
    return nn.Sequential(
        nn.Sequential(*features), nn.Flatten(), nn.Sequential(nn.Linear(12 * 4, 16), nn.ReLU(), nn.Linear(16, 5))
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.project = None
        if stride != 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.project is None else self.project(x)))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        outputs = 2 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.project = None
        if stride != 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(y)))))
        return functional.relu(y + (x if self.project is None else self.project(x)))


class ResNet(nn.Module):
    def __init__(self, *blocks: nn.Module, stem: int, head: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 1, 1, bias=False), nn.BatchNorm2d(stem), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(head, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def resnet_basic() -> nn.Module:
    return ResNet(BasicBlock(6, 6, 1), BasicBlock(6, 10, 2), BasicBlock(10, 10, 1), stem=6, head=10)


class PaddedBlock(BasicBlock):
    """A shortcut of every second pixel, padded with channels of zeros (option A of He et al.)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.project, self.stride, self.front = None, stride, (outputs - inputs) // 2
        self.back = outputs - inputs - self.front

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(y + functional.pad(shortcut, (0, 0, 0, 0, self.front, self.back)))


def resnet_padded() -> nn.Module:
    return ResNet(PaddedBlock(6, 6, 1), PaddedBlock(6, 9, 2), PaddedBlock(9, 9, 1), stem=6, head=9)


class SlicedShortcut(nn.Module):
    """A shortcut that carries a part of the channels: those in the middle can go with it, the others alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, 3, padding=1)
        self.narrow = nn.Conv2d(9, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        return self.fc(functional.relu(self.narrow(x) + x[:, 5:]).mean((2, 3)))


def resnet_bottleneck() -> nn.Module:
    return ResNet(Bottleneck(6, 4, 1), Bottleneck(8, 6, 2), Bottleneck(12, 6, 1), stem=6, head=12)


def resnext() -> nn.Module:
    return ResNet(Bottleneck(6, 12, 1, groups=3), Bottleneck(24, 12, 2, groups=3), stem=6, head=24)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * i) for i in range(3))
        self.layers = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.norm = nn.BatchNorm2d(18)
        self.fc = nn.Linear(18 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(functional.relu(norm(x)))], 1)
        return self.fc(functional.adaptive_avg_pool2d(functional.relu(self.norm(x)), 2).flatten(1))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branch1 = nn.Conv2d(8, 4, 1)
        self.branch3 = nn.Sequential(nn.Conv2d(8, 5, 1), nn.ReLU(), nn.Conv2d(5, 6, 3, padding=1))
        self.pooled = nn.Conv2d(8, 3, 1)
        self.head = nn.Conv2d(13, 6, 1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        pooled = self.pooled(functional.avg_pool2d(x, 3, 1, 1))
        x = torch.cat([self.branch1(x), self.branch3(x), pooled], dim=1)
        return self.fc(functional.relu(self.head(functional.relu(x))).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


def mobilenet() -> nn.Module:
    return ResNet(InvertedResidual(6, 12, 6, 1), InvertedResidual(6, 12, 8, 2), stem=6, head=8)


class ShuffleUnit(nn.Module):
    """Channels split in two, one half transformed, both joined and shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.inner = nn.Conv2d(half, half + 1, 1)
        self.outer = nn.Conv2d(half + 1, half, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        x = torch.cat([one, functional.relu(self.outer(functional.relu(self.inner(two))))], 1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def shufflenet() -> nn.Module:
    return ResNet(ShuffleUnit(8), ShuffleUnit(8), stem=8, head=8)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.squeeze = nn.Conv2d(width, 4, 1)
        self.excite = nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.conv(x))
        return y * torch.sigmoid(self.excite(functional.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))


def squeeze_excite() -> nn.Module:
    return ResNet(SqueezeExcite(8), BasicBlock(8, 8, 1), stem=8, head=8)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 6, 3, padding=1)
        self.down2 = nn.Conv2d(6, 10, 3, padding=1)
        self.up = nn.ConvTranspose2d(10, 7, 2, 2)
        self.merge = nn.Conv2d(13, 6, 3, padding=1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.relu(self.down1(x))
        deep = functional.relu(self.down2(functional.max_pool2d(skip, 2)))
        return self.out(functional.relu(self.merge(torch.cat([functional.relu(self.up(deep)), skip], 1))))


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(4, 12), nn.ReLU(),
        nn.Conv2d(12, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Conv2d(8, 6, 1), nn.GroupNorm(1, 6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


def prelu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 6, 3), nn.PReLU(), nn.Flatten(), nn.Linear(96, 7),
        nn.PReLU(7), nn.Linear(7, 5),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(36, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 5),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(6, 5, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(40, 5),
    )  # fmt: skip


class VisionTransformer(nn.Module):
    """Patches, one block of attention and MLP. Its code has the width of the heads in it, so they stay."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, 8))
        self.norm1 = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm2 = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        batch, tokens, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean(1))


class Block(nn.Module):
    """Attention and an MLP, each around a shortcut."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), attention
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Patches(nn.Module):
    """An image as tokens, one block, and a head."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, width))
        self.block = Block(width, attention)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.block(x).mean(1))


class FusedAttention(nn.Module):
    """Queries, keys and values of one layer; the scale follows the width of a head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


class BiasedAttention(nn.Module):
    """As timm has BEiT: biases by themselves, that of the keys no parameter; heads as wide together as the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.register_buffer("k_bias", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        qkv = functional.linear(x, self.qkv.weight, bias).reshape(batch, tokens, 3, self.num_heads, -1)
        x = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class BiasAddingAttention(nn.Module):
    """As BLOOM has it: heads in the batch dimension, scores by one function that adds a bias to the product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = heads, width // heads, (width // heads) ** -0.5
        self.qkv, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, self.num_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        query, key, value = qkv.reshape(3, batch * self.num_heads, tokens, self.head_dim).unbind(0)
        bias = torch.arange(float(tokens)).to(x).expand(batch * self.num_heads, 1, -1)
        weights = bias.baddbmm(batch1=query, batch2=key.transpose(1, 2), beta=0.1, alpha=self.scale).softmax(-1)
        heads = torch.bmm(weights, value).view(batch, self.num_heads, tokens, self.head_dim).transpose(1, 2)
        return self.dense(heads.reshape(batch, tokens, self.num_heads * self.head_dim))


class DividingAttention(nn.Module):
    """As many vision transformers have it: a head is as wide as the input divided by the number of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query = self.q(x).reshape(batch, tokens, self.num_heads, width // self.num_heads).permute(0, 2, 1, 3)
        key, value = self.kv(x).view(batch, tokens, 2, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


class WindowAttention(nn.Module):
    """Attention in windows, with a table of positions that has a column for each head."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.window, self.scale = heads, window, (width // heads) ** -0.5
        self.table = nn.Parameter(torch.randn(2 * window - 1, heads))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        x = x.view(-1, self.window, width)
        place = torch.arange(self.window)
        bias = self.table[(place[:, None] - place[None, :] + self.window - 1).flatten()]
        bias = bias.view(self.window, self.window, -1).permute(2, 0, 1)
        query, key, value = self.qkv(x).reshape(x.shape[0], self.window, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = (query * self.scale @ key.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        x = (weights @ value).transpose(1, 2).reshape(x.shape[0], self.window, -1)
        return self.proj(x).view(batch, tokens, -1)


class FunctionalAttention(nn.Module):
    """As torchvision has Swin: the weights of its layers in functions, the scale from the width of its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return _functional_attention(
            x, self.num_heads, self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias
        )


def _functional_attention(
    x: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    batch, tokens, width = x.shape
    qkv = functional.linear(x, qkv_weight, qkv_bias).reshape(batch, tokens, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    weights = (query * (width // heads) ** -0.5 @ key.transpose(-2, -1)).softmax(-1)
    return functional.linear((weights @ value).transpose(1, 2).reshape(batch, tokens, width), weight, bias)


class CosineAttention(nn.Module):
    """As Swin's second version has it: cosines, a scale for each head, and biases that a small network makes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, nn.Parameter(torch.rand(heads, 1, 1) + 1)
        self.positions = nn.Sequential(nn.Linear(1, 7), nn.ReLU(), nn.Linear(7, heads, bias=False))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(tokens).to(x)
        bias = self.positions((place[:, None] - place[None, :]).view(-1, 1)).view(tokens, tokens, -1).permute(2, 0, 1)
        cosines = functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).transpose(-2, -1)
        weights = (cosines * self.scale + 2 * bias.sigmoid()).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, tokens, -1))


class EinsteinAttention(nn.Module):
    """As SAM has it: sums by ``einsum``, of queries with a table of positions too, heads in the batch dimension."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.table = nn.Parameter(torch.randn(tokens, tokens, width // heads))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.reshape(3, batch * self.num_heads, tokens, -1).unbind(0)
        scores = torch.einsum("bid,bjd->bij", query, key) + torch.einsum("bid,ijd->bij", query, self.table)
        x = torch.einsum("bij,bjd->bid", scores.softmax(-1), value).view(batch, self.num_heads, tokens, -1)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, -1))


class PartlyTurnedAttention(nn.Module):
    """As EVA has it: positions turn queries and keys of all tokens but the first, made with the values by one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        angles = torch.linspace(0, 1, (tokens - 1) * self.head_dim).view(tokens - 1, self.head_dim).to(x)
        x = functional.scaled_dot_product_attention(self._turned(query, angles), self._turned(key, angles), value)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, -1))

    @staticmethod
    def _turned(x: Tensor, angles: Tensor) -> Tensor:
        first, rest = x[:, :, :1], x[:, :, 1:]
        turned = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([first, rest * angles.cos() + turned * angles.sin()], 2)


class TurnedLinear(nn.Linear):
    """As Falcon has it: a product with the weight turned."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class TwiceAttention(nn.Module):
    """Two attentions in one module, whose numbers of heads are in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.out, self.proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self._attended(self.two, self.out(self._attended(self.one, x))))

    def _attended(self, layer: nn.Linear, x: Tensor) -> Tensor:
        query, key, value = layer(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        return ((query @ key.mT / 2).softmax(-1) @ value).transpose(1, 2).flatten(2)


class OneKeyAttention(nn.Module):
    """As Falcon has it: all queries share a key and a value, which are the last two heads of one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.dense = TurnedLinear(width, width + 2 * self.head_dim), TurnedLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, self.num_heads + 2, self.head_dim).transpose(1, 2)
        query, key, value = qkv[:, :-2], qkv[:, [-2]], qkv[:, [-1]]
        weights = (query @ key.transpose(-2, -1) / 2).softmax(-1)
        return self.dense((weights @ value).transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


class SeparateAttention(nn.Module):
    """As BERT has it: three layers, and attributes for all sizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.scaling = self.attention_head_size**-0.5

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = functional.softmax(torch.matmul(query, key.transpose(2, 3)) * self.scaling, dim=-1)
        context = torch.matmul(weights, value).transpose(1, 2).contiguous()
        return self.dense(context.view(*x.shape[:2], self.all_head_size))


class RotaryAttention(nn.Module):
    """As Llama has it: positions turn queries and keys, and several queries share a key and a value."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = width // heads, heads // kv_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        shape = (batch, tokens, -1, self.head_dim)
        query, key, value = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        rates = 100.0 ** -torch.arange(0, 1, 2 / self.head_dim)
        angles = (torch.arange(tokens)[:, None] * rates).repeat(1, 2).to(x)
        query, key = self._turned(query, angles), self._turned(key, angles)
        key, value = (self._repeated(part) for part in (key, value))
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(x.transpose(1, 2).reshape(batch, tokens, -1))

    def _repeated(self, x: Tensor) -> Tensor:
        batch, heads, tokens, width = x.shape
        x = x[:, :, None].expand(batch, heads, self.num_key_value_groups, tokens, width)
        return x.reshape(batch, heads * self.num_key_value_groups, tokens, width)

    @staticmethod
    def _turned(x: Tensor, angles: Tensor) -> Tensor:
        one, two = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()


class ConvAttention(nn.Module):
    """Attention between pixels, by convolutions of one pixel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        query, key, value = self.qkv(x).view(batch, 3, self.heads, -1, height * width).unbind(1)
        weights = (query.transpose(2, 3) @ key / 2).softmax(-1)
        attended = (weights @ value.transpose(2, 3)).transpose(2, 3)
        return x + self.out(attended.reshape(batch, -1, height, width))


class PixelAttention(nn.Module):
    """As timm's NextViT has it: between pixels, whose width, under batch norms, stands where that of the heads does."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        batch, count, width = pixels.shape
        query = self.q(pixels).reshape(batch, count, self.num_heads, self.head_dim).transpose(1, 2)
        key, value = self.kv(pixels).reshape(batch, count, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, scale=0.5)
        return x + self.out(attended.transpose(1, 2).reshape(batch, count, width)).transpose(1, 2).reshape(x.shape)


class Experts(nn.Module):
    """As transformers has them: the weights of all in two tensors, each token read by some."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.intermediate_dim, self.act = inner, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, width) / 4)
        self.down_proj = nn.Parameter(torch.randn(count, width, inner) / 4)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in chosen.unique():
            token, place = torch.where(chosen == number)
            gate, up = functional.linear(x[token], self.gate_up_proj[number]).chunk(2, -1)
            made = functional.linear(self.act(gate) * up, self.down_proj[number])
            result.index_add_(0, token, made * shares[token, place, None])
        return result


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), Experts(width, inner, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, chosen, shares).view(x.shape)


class TorchAttention(nn.Module):
    """``nn.MultiheadAttention`` of its input alone; with keys and values of their own widths if told so."""

    def __init__(self, width: int, heads: int, packed: bool = True) -> None:
        super().__init__()
        self.memory = None if packed else nn.Linear(width, 5)
        other = {} if packed else {"kdim": 5, "vdim": 5}
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True, **other)

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.memory is None else self.memory(x)
        return self.inner(x, other, other, need_weights=False)[0]


class Gated(nn.Module):
    """A gated unit: channel i of one half and of the other go together, and a scale that is a lone parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, dim=1)
        return self.fc((self.scale * value * torch.sigmoid(gate)).mean((2, 3)))


class ChannelsLastFlatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc1 = nn.Linear(6 * 64, 9)
        self.fc2 = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.relu(self.fc1(functional.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))))


class ChannelSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.mix = nn.Conv2d(6, 7, 1)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(functional.gelu(self.mix(self.conv(x).softmax(1))).mean((2, 3)))


class UnevenSplit(nn.Module):
    """Halves of one layer's channels that are read by different layers: ``chunk`` needs them to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(4, 6, 1)
        self.right = nn.Conv2d(4, 6, 1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, two = functional.relu(self.conv(x)).chunk(2, dim=1)
        return self.fc((self.left(one) + self.right(two)).relu().mean((2, 3)))


class ConvNext(nn.Module):
    """A depthwise convolution, a norm over the channels, two layers over the channels, and a scale that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.expand, self.project = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(functional.gelu(self.expand(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


class Mixer(nn.Module):
    """Layers over the tokens and layers over the channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.token1, self.token2 = nn.Linear(16, 9), nn.Linear(9, 16)
        self.channel1, self.channel2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.token2(functional.gelu(self.token1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.channel2(functional.gelu(self.channel1(self.norm2(x))))
        return self.head(x.mean(1))


class RepBlock(nn.Module):
    """A 3×3 and a 1×1 convolution and the input itself, each normalised, added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.wide, self.wide_norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.narrow, self.narrow_norm = nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide_norm(self.wide(x)) + self.narrow_norm(self.narrow(x))
        return functional.relu(y if self.identity is None else y + self.identity(x))


def repvgg() -> nn.Module:
    return ResNet(RepBlock(6, 8), RepBlock(8, 8), RepBlock(8, 10), stem=6, head=10)


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2: the weight is (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class CausalAttention(nn.Module):
    """As GPT-2 has it: queries, keys and values of one `Conv1D`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.split_size, self.head_dim = heads, width, width // heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.c_attn(x).split(self.split_size, dim=2)
        query, key, value = (part.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, -1))


def gpt2() -> nn.Module:
    model = Patches(8, CausalAttention(8, 2))
    model.block.fc1, model.block.fc2 = Conv1D(16, 8), Conv1D(8, 16)
    return model


class Tokens(nn.Module):
    """Patches, a class token and a table of positions, all as wide as the patches are deep."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.fc1, self.fc2 = nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = functional.gelu(self.fc1(x))
        return self.fc2(x[:, 0] + x[:, 1:].mean(1))


class SuperResolution(nn.Module):
    """Channels become pixels, and pixels channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.down, self.fc = nn.Conv2d(24, 7, 1), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.middle(functional.relu(functional.pixel_shuffle(self.up(x), 2))))
        return self.fc(functional.relu(self.down(functional.pixel_unshuffle(x, 2))).mean((2, 3)))


class Recurrent(nn.Module):
    """Rows of an image one after the other; the head reads the outputs of all steps and the last state."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Linear(8, 7), kind(7, 6, batch_first=True, **options)
        ways = 2 if self.recurrent.bidirectional else 1
        self.again = nn.GRU(ways * 6, 5, batch_first=True)
        self.head = nn.Linear(5 + 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.embed(x.flatten(1, 2)))
        steps, ended = self.recurrent(x)
        last = ended[0] if isinstance(ended, tuple) else ended
        return self.head(torch.cat([self.again(steps)[0].mean(1), last[-1]], 1))


_IMAGE = (2, 3, 8, 8)

ZOO: dict[str, Specimen] = {
    "fnn": Specimen(fnn, (2, 1, 4, 4), {"input": 16, "1": 12, "3": 10}, ("6",)),
    "vgg": Specimen(lambda: vgg(False), _IMAGE, {"0.0": 8, "0.2": 8, "0.5": 12, "2.0": 16}, ("2.2",)),
    "vgg-bn": Specimen(lambda: vgg(True), _IMAGE, {"0.0": 8, "0.3": 8, "0.7": 12, "2.0": 16}, ("2.2",)),
    "resnet-basic": Specimen(
        resnet_basic,
        _IMAGE,
        {"stem.0": 6, "blocks.0.conv1": 6, "blocks.1.conv1": 10, "blocks.1.conv2": 10, "blocks.2.conv1": 10},
        ("fc",),
    ),
    "resnet-bottleneck": Specimen(
        resnet_bottleneck,
        _IMAGE,
        {
            **{"stem.0": 6, "blocks.0.conv1": 4, "blocks.0.conv2": 4, "blocks.0.conv3": 8, "blocks.1.conv1": 6},
            **{"blocks.1.conv2": 6, "blocks.1.conv3": 12, "blocks.2.conv1": 6, "blocks.2.conv2": 6},
        },
        ("fc",),
    ),
    "resnet-padded": Specimen(
        resnet_padded,
        _IMAGE,
        {"stem.0": 6, "blocks.0.conv1": 6, "blocks.1.conv1": 9, "blocks.2.conv1": 9},
        ("blocks.1.conv2", "fc"),
    ),
    "sliced-shortcut": Specimen(SlicedShortcut, _IMAGE, {"stem[1]": 4}, ("stem", "fc")),
    "resnext": Specimen(
        resnext,
        _IMAGE,
        {
            **{"stem.0": 6, "blocks.0.conv1": 4, "blocks.0.conv2": 4, "blocks.0.conv3": 24},
            **{"blocks.1.conv1": 4, "blocks.1.conv2": 4, "blocks.1.conv3": 24},
        },
        ("fc",),
    ),
    "densenet": Specimen(DenseNet, _IMAGE, {"stem": 6, "layers.0": 4, "layers.1": 4, "layers.2": 4}, ("fc",)),
    "inception": Specimen(
        Inception,
        _IMAGE,
        {"stem": 8, "pooled": 3, "branch1": 4, "branch3.0": 5, "branch3.2": 6, "head": 6},
        ("fc",),
    ),
    "mobilenet": Specimen(
        mobilenet,
        _IMAGE,
        {"stem.0": 6, "blocks.0.expand.0": 12, "blocks.1.expand.0": 12, "blocks.1.project.0": 8},
        ("fc",),
    ),
    "shufflenet": Specimen(shufflenet, _IMAGE, {"stem.0": 2, "blocks.0.inner": 5, "blocks.1.inner": 5}, ("fc",)),
    "squeeze-excite": Specimen(
        squeeze_excite,
        _IMAGE,
        {"stem.0": 8, "blocks.0.conv": 8, "blocks.0.squeeze": 4, "blocks.1.conv1": 8},
        ("fc",),
    ),
    "unet": Specimen(UNet, _IMAGE, {"down1": 6, "down2": 10, "up": 7, "merge": 6}, ("out",)),
    "group-norm": Specimen(group_norm, _IMAGE, {"0": 4, "3": 8}, ("6", "11")),
    "prelu": Specimen(prelu, _IMAGE, {"0": 8, "2": 6, "5": 7}, ("7",)),
    "conv1d": Specimen(conv1d, (3, 3, 8), {"0": 8, "3": 6, "6": 9}, ("9",)),
    "conv3d": Specimen(conv3d, (2, 2, 4, 4, 4), {"0": 6, "4": 5}, ("7",)),
    "vit": Specimen(VisionTransformer, _IMAGE, {"fc1": 16}, ("patch", "head")),
    "vit-heads": Specimen(
        lambda: Patches(12, FusedAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "beit": Specimen(
        lambda: Patches(12, BiasedAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "bloom": Specimen(
        lambda: Patches(12, BiasAddingAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "dividing-attention": Specimen(
        lambda: Patches(12, DividingAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "swin": Specimen(
        lambda: Patches(12, WindowAttention(12, 3, 4)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "functional-attention": Specimen(
        lambda: Patches(12, FunctionalAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "cosine-attention": Specimen(
        lambda: Patches(12, CosineAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention.positions.0": 7, "block.fc1": 10},
        ("patch", "head"),
    ),
    "einstein-attention": Specimen(
        lambda: Patches(12, EinsteinAttention(12, 3, 16)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.fc1": 10},
        ("patch", "head"),
    ),
    "partly-turned-attention": Specimen(
        lambda: Patches(12, PartlyTurnedAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.fc1": 10},
        ("patch", "head"),
    ),
    "twice-attention": Specimen(
        lambda: Patches(12, TwiceAttention(12)),
        _IMAGE,
        {"block.attention[dims]": 4, "block.attention.out": 12, "block.attention.two[dims]": 4, "block.fc1": 10},
        ("patch", "head", "block.attention[heads]", "block.attention.two[heads]"),
    ),
    "one-key-attention": Specimen(
        lambda: Patches(12, OneKeyAttention(12, 3)),
        _IMAGE,
        {"block.attention[queries]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "bert": Specimen(
        lambda: Patches(12, SeparateAttention(12, 3)),
        _IMAGE,
        {"block.attention[heads]": 3, "block.attention[dims]": 4, "block.fc1": 10},
        ("patch", "head"),
    ),
    "llama": Specimen(
        lambda: Patches(24, RotaryAttention(24, 6, 2)),
        _IMAGE,
        {"block.attention[heads]": 2, "block.attention[queries]": 3, "block.fc1": 10},
        ("patch", "head", "block.attention[values]"),
    ),
    "hybrid": Specimen(
        lambda: ResNet(ConvAttention(8, 2), BasicBlock(8, 8, 1), stem=8, head=8),
        _IMAGE,
        {"stem.0": 8, "blocks.0[heads]": 2, "blocks.0[dims]": 4, "blocks.1.conv1": 8},
        ("fc",),
    ),
    "pixel-attention": Specimen(
        lambda: ResNet(PixelAttention(8, 2), BasicBlock(8, 8, 1), stem=8, head=8),
        _IMAGE,
        {"stem.0": 8, "blocks.0[heads]": 2, "blocks.0[dims]": 4, "blocks.1.conv1": 8},
        ("fc",),
    ),
    "torch-attention": Specimen(
        lambda: Patches(12, TorchAttention(12, 3)),
        _IMAGE,
        {
            **{"block.attention.inner[heads]": 3, "block.attention.inner[keys]": 4, "block.attention.inner[values]": 4},
            **{"block.fc1": 10},
        },
        ("patch", "head"),
    ),
    "torch-cross-attention": Specimen(
        lambda: Patches(12, TorchAttention(12, 3, packed=False)),
        _IMAGE,
        {
            **{"block.attention.inner[heads]": 3, "block.attention.inner[keys]": 4, "block.attention.inner[values]": 4},
            **{"block.fc1": 10},
        },
        ("patch", "head"),
    ),
    "mixture": Specimen(
        lambda: Patches(12, Mixture(12, 24)),
        _IMAGE,
        {"block.attention.experts": 3, "block.fc1": 10},
        ("patch", "block.attention.router", "head"),
    ),
    "gated": Specimen(Gated, _IMAGE, {"conv": 6}, ("fc",)),
    "channels-last-flatten": Specimen(ChannelsLastFlatten, _IMAGE, {"conv": 6, "fc1": 9}, ("fc2",)),
    "channel-softmax": Specimen(ChannelSoftmax, _IMAGE, {"mix": 7}, ("conv", "fc")),
    "uneven-split": Specimen(UnevenSplit, _IMAGE, {"conv": 4, "left": 6}, ("fc",)),
    "convnext": Specimen(ConvNext, _IMAGE, {"expand": 16}, ("stem", "head")),
    "mixer": Specimen(Mixer, _IMAGE, {"token1": 9, "channel1": 12}, ("patch", "head")),
    "repvgg": Specimen(repvgg, _IMAGE, {"stem.0": 6, "blocks.0.wide": 8, "blocks.2.wide": 10}, ("fc",)),
    "gpt2": Specimen(
        gpt2,
        _IMAGE,
        {"block.attention[heads]": 2, "block.attention[dims]": 4, "block.fc1": 16},
        ("patch", "head"),
    ),
    "lstm": Specimen(
        lambda: Recurrent(nn.LSTM), _IMAGE, {"input": 8, "embed": 7, "recurrent": 6, "again": 5}, ("head",)
    ),
    "gru-deep": Specimen(
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True),
        _IMAGE,
        {"input": 8, "embed": 7, "recurrent": 6, "again": 5},
        ("head",),
    ),
    "tokens": Specimen(Tokens, _IMAGE, {"patch": 8, "fc1": 10}, ("fc2",)),
    "super-resolution": Specimen(SuperResolution, _IMAGE, {"up": 4, "middle": 6, "down": 7}, ("fc",)),
}


def zeroed_output(model: nn.Module, chosen: list[tuple[Group, Tensor]], x: Tensor) -> Tensor:
    """What the network says when these units are zeroed where they are read, in evaluation mode."""
    with zeroed(chosen, model):
        return evaluate(model, x)


@contextmanager
def zeroed(chosen: list[tuple[Group, Tensor]], model: nn.Module) -> Iterator[None]:
    """The network with these units zeroed where they are read, for a while."""
    handles = []
    before = Snapshot(model, copy=True)
    for group, units in chosen:
        inside = [member for member in group.consumers if group.attention is not None or is_experts(member.module)]
        for member in inside:
            _zero(member, units)  # by its weights: torch's attention does not call its output projection
        for member in group.producers:
            if isinstance(member.module, nn.RNNBase):
                _zero(member, units, dim=1)  # a state is read by its own layer too
        for member in [query for query, _ in group.products] + [m for m in group.carriers if group.products]:
            _zero(member, units)
        for member in group.consumers if not inside else ():
            columns = member.index[units].flatten()

            def zero(_: nn.Module, inputs: tuple[Any, ...], columns: Tensor = columns) -> tuple[Any, ...]:
                value = inputs[0].clone()
                # Linear layers read the last dimension, convolutions the second of (batch, channel, …).
                if isinstance(_, nn.Linear | Conv1D | nn.RNNBase):
                    value[..., columns] = 0
                else:
                    value[:, columns] = 0
                return value, *inputs[1:]

            handles.append(member.module.register_forward_pre_hook(zero))
    yield
    for handle in handles:
        handle.remove()
    before.restore()


def _zero(member: Member, units: Tensor, dim: int | None = None) -> None:
    """Zeroes the weights, and biases, of some units on one side of a layer, or of a parameter by itself."""
    if member.dim is not None:
        tensor = getattr(member.module, member.name.rpartition(".")[2])
        tensor.data = tensor.data.index_fill(member.dim, member.index[units].flatten(), 0)
        return
    for slab in axis_of(member.module, member.side).slabs:
        tensor = getattr(member.module, slab.tensor, None)
        if tensor is not None and dim in (None, slab.dim):
            own = slab.entries(member.index[units].flatten(), tensor.shape[slab.dim])
            tensor.data = tensor.data.index_fill(slab.dim, own, 0)


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """The network's output in evaluation mode, which is left as it was."""
    training = model.training
    with torch.no_grad():
        output = model.eval()(x)
    model.train(training)
    return output


def some_units(graph: ChannelGraph, seed: int = 0) -> list[tuple[Group, Tensor]]:
    """Of every group of more than one unit about a third of the units, at random."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (group, torch.randperm(group.size, generator=generator)[: max(1, group.size // 3)].sort().values)
        for group in graph
        if group.size > 1
    ]


def remove(
    model: nn.Module, graph: ChannelGraph, chosen: list[tuple[Group, Tensor]], optimizer: Optimizer | None = None
) -> None:
    """Remove units one group after the other, as an event does; a lost input feature is picked out by a hook."""
    for name, units in [(group.name, units) for group, units in chosen]:
        group = graph[name]
        cuts = plan_cuts([(group, units)])
        apply_cuts(model, cuts, optimizer)
        graph.shrink(cuts)
        if group.is_input:
            keep = torch.tensor([unit for unit in range(group.size) if unit not in units.tolist()])
            for member in group.consumers:
                member.module.register_forward_pre_hook(lambda _, x, keep=keep: x[0].index_select(-1, keep))


def make_twin(group: Group, unit: int, of: int) -> None:
    """Makes one unit an exact copy of another wherever it is produced or carried."""
    for member in group.producers + group.carriers:
        here, there = member.index[unit], member.index[of]
        if member.dim is not None:
            lone = member.module._parameters[member.name.rpartition(".")[2]]
            places = [(lone, member.dim)]
        else:
            tensors = {**member.module._buffers, **member.module._parameters}
            slabs = axis_of(member.module, member.side).slabs
            places = [(tensors.get(slab.tensor), slab.dim) for slab in slabs]
        for tensor, dim in places:
            if tensor is not None and tensor.dim():
                size = tensor.shape[dim]
                tensor.data.index_copy_(dim, here % size, tensor.data.index_select(dim, there % size))
