"""The networks of transformers, from their configurations: heads and dimensions go, and what is left runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from rlsprune.graph import find_groups
from rlsprune.model.calls import output_tensors
from zoo import remove, some_units, zeroed

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.arange(14).view(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
SMALL = {"vocab_size": 20, "hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 1}
IMAGE = {"pixel_values": torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(**SMALL, num_attention_heads=4)
        return transformers.BertModel(config, add_pooling_layer=False), TOKENS
    if name == "llama":
        config = transformers.LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=2)
        return transformers.LlamaModel(config), {**TOKENS, "use_cache": False}
    if name == "qwen3":
        config = transformers.Qwen3Config(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
        return transformers.Qwen3Model(config), {**TOKENS, "use_cache": False}
    if name == "vit":
        config = transformers.ViTConfig(**SMALL, num_attention_heads=4, image_size=16, patch_size=8)
        return transformers.ViTModel(config, add_pooling_layer=False), IMAGE
    if name == "mixtral":
        config = transformers.MixtralConfig(
            **{**SMALL, "intermediate_size": 24}, num_attention_heads=6, num_key_value_heads=2, num_local_experts=3
        )
        return transformers.MixtralModel(config), {**TOKENS, "use_cache": False}
    if name == "deberta":
        options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "num_attention_heads": 4}
        return transformers.DebertaV2Model(transformers.DebertaV2Config(**SMALL, **options)), TOKENS
    config = transformers.SwinConfig(
        image_size=16, patch_size=4, embed_dim=12, depths=[1], num_heads=[3], window_size=2
    )
    return transformers.SwinModel(config, add_pooling_layer=False), IMAGE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"heads": 4, "dims": 6}),
        ("llama", {"heads": 2, "queries": 3}),
        ("qwen3", {"heads": 2, "queries": 3}),
        ("vit", {"heads": 4, "dims": 6}),
        ("swin", {"heads": 3, "dims": 4}),
        ("mixtral", {"heads": 2, "queries": 3}),
        ("deberta", {"heads": 4, "values": 6}),  # scores of content and of positions are added
    ],
)
def test_heads_go_and_what_is_left_runs(name: str, expected: dict[str, int], tmp_path: Path) -> None:
    model, inputs = make(name)
    graph = find_groups(model, inputs)
    found = {group.name.partition("[")[2].strip("]"): group.size for group in graph if group.attention is not None}
    assert found == expected
    assert name != "mixtral" or graph["layers.0.mlp.experts"].size == 3
    chosen = some_units(graph)
    with zeroed(chosen, model):
        wanted = run(model, inputs)
    remove(model, graph, chosen)
    torch.testing.assert_close(run(model, inputs), wanted, rtol=1e-5, atol=1e-5)
    rlsprune.save(model, tmp_path / "small.safetensors")
    fresh = rlsprune.load(tmp_path / "small.safetensors", into=make(name)[0])
    torch.testing.assert_close(run(fresh, inputs), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(copy.deepcopy(model), inputs), wanted, rtol=1e-5, atol=1e-5)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    output_tensors(model(**inputs))[0].square().mean().backward()
    optimizer.step()


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return output_tensors(model.eval()(**inputs))[0]


class _OneHead(nn.Module):
    """Attention of a single wide head, as autoencoders of images have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, width) for _ in range(3))
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        return self.out(scores.softmax(-1) @ self.v(x))


def test_dimensions_of_a_head_of_512_can_go() -> None:
    graph = find_groups(_OneHead(512), torch.rand(2, 4, 8))
    sizes = sorted(group.size for group in graph if group.attention is not None)
    assert sizes == [512, 512]


class _FusedQueries(nn.Module):
    """Queries and keys from one layer, values from another, as in TNT."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.qk, self.v, self.proj = nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k = self.qk(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        v = self.v(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1))


def test_a_cut_of_values_knows_of_an_earlier_one_of_keys() -> None:
    torch.manual_seed(0)
    model, inputs = _FusedQueries(), torch.rand(2, 5, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, inputs, ratio=0.3, criterion="l1", compensate=False)
    event = pruner.prune()
    assert event is not None
    assert {name.partition("[")[2] for name in event.removed} >= {"heads]", "keys]", "values]"}
    assert (model.num_heads, model.head_dim, model.qk.out_features) == (3, 5, 30)
    assert model(inputs).shape == (2, 5, 3)
