"""An open ``nn.MultiheadAttention``: any number of heads of any width, and an output projection that is called."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["OpenAttention", "open_attention", "opened", "value_dim"]


class OpenAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention``, with its own parameters, from which heads may be gone.

    That class wants the heads together to be as wide as the embedding, and uses its output projection's weight without
    calling it. `open_attention` changes its class to this one, so that names, parameters and hooks stay. ``embed_dim``
    is the width outside; inside there are ``num_heads`` of ``head_dim`` and ``value_dim`` each.
    """

    value_dim: int
    """Width of a head's values; ``head_dim`` is that of its queries and keys."""
    scaling: float
    """Factor of the scores: that of a head as wide as in training."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what ``nn.MultiheadAttention`` computes."""
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal is only a hint and needs attn_mask: give both, as nn.MultiheadAttention requires"
            )
        if query.is_nested:
            return self._of_nested(query, need_weights, average_attn_weights)
        batched = query.dim() == 3
        tensors = [query, key, value] if batched else [part.unsqueeze(0) for part in (query, key, value)]
        if batched and not self.batch_first:
            tensors = [part.transpose(0, 1) for part in tensors]
        queries, keys, values = self._projected(*tensors)
        batch, count = queries.shape[0], queries.shape[1]
        length = keys.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            keys = torch.cat([keys, self.bias_k.expand(batch, 1, -1)], 1)
            values = torch.cat([values, self.bias_v.expand(batch, 1, -1)], 1)
        if self.add_zero_attn:
            keys, values = (torch.cat([part, part.new_zeros(batch, 1, part.shape[2])], 1) for part in (keys, values))
        mask = self._mask(attn_mask, key_padding_mask, queries, length, keys.shape[1])
        heads = [
            part.view(batch, part.shape[1], self.num_heads, -1).transpose(1, 2) for part in (queries, keys, values)
        ]
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = heads[0] @ heads[1].transpose(2, 3) * self.scaling
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            attended = weights @ heads[2]
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, dropout, scale=self.scaling)
        output = self.out_proj(attended.transpose(1, 2).reshape(batch, count, self.num_heads * self.value_dim))
        if not batched:
            return output.squeeze(0), weights
        return output if self.batch_first else output.transpose(0, 1), weights

    def _of_nested(self, sequences: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Runs on nested sequences, as torch's encoder passes them, by padding them meanwhile."""
        lengths = [len(one) for one in sequences.unbind()]
        padded = sequences.to_padded_tensor(0.0)
        padding = torch.arange(padded.shape[1])[None, :] >= torch.tensor(lengths)[:, None]
        padding = padding.to(padded.device)
        output, weights = self(padded, padded, padded, padding, need_weights, None, average)
        return torch.nested.as_nested_tensor(
            [one[:length] for one, length in zip(output, lengths, strict=True)]
        ), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        width, value_width = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        sizes = [width, width, value_width]
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, sizes)
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif query is key and key is value:
            return list(torch.split(F.linear(query, self.in_proj_weight, self.in_proj_bias), sizes, -1))
        else:
            weights = list(torch.split(self.in_proj_weight, sizes))
        parts = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(part, weight, bias) for part, weight, bias in parts]

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, queries: Tensor, length: int, width: int
    ) -> Tensor | None:
        """Joins both masks into one that is added to the scores, ``(batch, heads or 1, queries, keys)``."""
        if attn_mask is None and padding is None:
            return None
        batch, count = queries.shape[:2]
        total = queries.new_zeros(())
        if attn_mask is not None:
            if attn_mask.dim() == 3 and len(attn_mask) != batch * self.num_heads:
                raise ValueError(
                    f"attn_mask has {len(attn_mask)} masks, one for each head of each of {batch} inputs, but "
                    f"{self.num_heads} heads are left: give one two-dimensional mask for all heads"
                )
            attn_mask = attn_mask.view(-1, self.num_heads, count, length) if attn_mask.dim() == 3 else attn_mask
            total = total + _added(attn_mask, queries)
        if padding is not None:
            total = total + _added(padding.view(-1, 1, 1, length), queries)
        return F.pad(total, (0, width - length)) if width > length else total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Makes a mask one to add: −∞ where a boolean mask is true, so that nothing there is attended to."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)


def value_dim(attention: nn.MultiheadAttention) -> int:
    """Returns the width of a head's values."""
    return attention.value_dim if isinstance(attention, OpenAttention) else attention.head_dim


def open_attention(model: nn.Module) -> list[nn.MultiheadAttention]:
    """Opens every ``nn.MultiheadAttention`` of a model; returns those that were not open."""
    found = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    for module in found:
        module.__class__ = OpenAttention
        module.value_dim, module.scaling = module.head_dim, module.head_dim**-0.5
        # Torch's fused encoder layer would read the weights on its own; this tells it not to.
        module._qkv_same_embed_dim = False
    return found


@contextlib.contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Opens every ``nn.MultiheadAttention`` inside the block."""
    modules = open_attention(model)
    try:
        yield
    finally:
        for module in modules:
            module._qkv_same_embed_dim = module.in_proj_weight is not None
            del module.value_dim, module.scaling
            module.__class__ = nn.MultiheadAttention
