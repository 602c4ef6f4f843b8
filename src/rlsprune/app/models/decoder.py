"""A decoder of eight billion parameters, for planning: its layers and sizes are those of Llama 3 8B."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["CONTEXT", "decoder_8b"]

CONTEXT = 2048
"""Tokens of one input."""


class _Attention(nn.Module):
    """Attention in which groups of queries share keys and values."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, shared * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.size)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        k, v = (part.repeat_interleave(self.heads // self.shared, dim=1) for part in (k, v))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _Attention(width, heads, shared)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class _Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, shared, inner) for _ in range(depth)), nn.RMSNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.tokens(ids)))
        return scores


def decoder_8b() -> nn.Module:
    """Builds 32 blocks of width 4,096; rotary embeddings, which have no weights, are left out."""
    return _Decoder(vocabulary=128_256, width=4096, depth=32, heads=32, shared=8, inner=14_336)
