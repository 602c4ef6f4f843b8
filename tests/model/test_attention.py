"""``nn.MultiheadAttention`` in the open computes what the closed one does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rlsprune.model.attention import OpenAttention, open_attention, opened


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("mask", ["none", "added", "forbidden", "each head"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 10, "vdim": 6}, {"batch_first": True}],
    ids=str,
)
def test_open_is_closed(options: dict[str, int], mask: str) -> None:
    torch.manual_seed(0)
    closed = nn.MultiheadAttention(12, 3, **options).eval()
    public = copy.deepcopy(closed)
    open_attention(public)
    assert isinstance(public, OpenAttention)
    shapes = [(5, 2, 12), (4, 2, options.get("kdim", 12)), (4, 2, options.get("vdim", 12))]
    inputs = [
        torch.randn(shape).transpose(0, 1) if options.get("batch_first") else torch.randn(shape) for shape in shapes
    ]
    forbidden = torch.rand(6, 5, 4) > 0.7
    forbidden[..., 0] = False
    masks = {"none": None, "added": torch.randn(5, 4), "forbidden": forbidden[0], "each head": forbidden}
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    for arguments in ({}, {"key_padding_mask": padding}, {"need_weights": False}, {"average_attn_weights": False}):
        ours, theirs = (one(*inputs, attn_mask=masks[mask], **arguments) for one in (public, closed))
        torch.testing.assert_close(ours[0], theirs[0])
        assert (ours[1] is None) == (theirs[1] is None)
        if theirs[1] is not None:
            torch.testing.assert_close(ours[1], theirs[1])


def test_one_sequence_without_a_batch() -> None:
    closed = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 8)
    expected, weights = closed(x, x, x)
    with opened(closed):
        found, ours = closed(x, x, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, weights)
    assert type(closed) is nn.MultiheadAttention


@pytest.mark.parametrize("padded", [False, True])
def test_fused_encoder_layer_lets_it_compute(padded: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = padded
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask if padded else None)
        open_attention(encoder)
        found = encoder(x, src_key_padding_mask=mask if padded else None)
    torch.testing.assert_close(found[~mask], expected[~mask])


def test_masks_of_heads_that_are_gone_are_refused() -> None:
    attention = nn.MultiheadAttention(8, 4)
    open_attention(attention)
    attention.num_heads = 3
    x = torch.randn(5, 2, 8)
    with pytest.raises(ValueError, match="3 heads are left"):
        attention._mask(torch.zeros(8, 5, 5), None, x.transpose(0, 1), 5, 5)
