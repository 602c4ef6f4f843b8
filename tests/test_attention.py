"""Networks without some of their heads: kept in files, copied, exported, shrunk in closed form, and counted."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rlsprune
from rlsprune.graph import find_groups, open_attention_of
from rlsprune.graph.sites import find_sites
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.shrinking.closed_form import ClosedForm
from rlsprune.shrinking.principal import turn_heads
from zoo import ZOO, BiasedAttention, Conv1D, evaluate, remove, some_units, zeroed

NAMES = [
    "vit-heads",
    "beit",
    "dividing-attention",
    "swin",
    "bert",
    "gpt2",
    "llama",
    "hybrid",
    "pixel-attention",
    "torch-attention",
    "torch-cross-attention",
]
attentive = pytest.mark.parametrize("name", NAMES)


def pruned(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = ZOO[name].model(), ZOO[name].inputs()
    graph = find_groups(model, x)
    remove(model, graph, some_units(graph))
    return model.eval(), x


@attentive
def test_comes_back_from_a_file_and_from_a_copy(name: str, tmp_path: Path) -> None:
    model, x = pruned(name)
    rlsprune.save(model, tmp_path / "small.safetensors")
    fresh = rlsprune.load(tmp_path / "small.safetensors", into=ZOO[name].model(seed=5))
    assert torch.equal(evaluate(fresh, x), evaluate(model, x))
    assert torch.equal(evaluate(copy.deepcopy(model), x), evaluate(model, x))
    again = find_groups(fresh, x)
    assert [(group.name, group.size) for group in again] == [
        (group.name, group.size) for group in find_groups(model, x)
    ]


def test_a_fitted_attention_is_pickled_as_the_class_it_was() -> None:
    model, x = pruned("beit")
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again.block.attention, BiasedAttention)
    assert torch.equal(evaluate(again, x), evaluate(model, x))


@pytest.mark.parametrize("name", ["swin", "llama", "beit", "torch-attention"])
def test_exports_to_onnx(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = pruned(name)
    rlsprune.export_onnx(model, x, tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), evaluate(model, x), rtol=1e-4, atol=1e-4)


@attentive
def test_flops_fall_with_heads(name: str) -> None:
    model, x = ZOO[name].model(), ZOO[name].inputs()
    graph = find_groups(model, x)
    heads = next(group for group in graph if group.name.endswith("[heads]"))
    before = rlsprune.profile(model, x, min_seconds=0.0)
    remove(model, graph, [(heads, torch.tensor([0]))])
    after = rlsprune.profile(model, x, min_seconds=0.0)
    rows = sum(member.index[0].numel() * member.module.weight[0].numel() for member in heads.consumers)
    assert after.flops < before.flops
    assert before.weights - after.weights >= rows


@attentive
def test_turned_heads_say_the_same(name: str) -> None:
    model, x = ZOO[name].model().eval(), ZOO[name].inputs(batch=32)
    graph = find_groups(model, x)
    open_attention_of(graph)
    inside = [group.name for group in graph if group.level == 2]
    before = evaluate(model, x)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    found = turn_heads(model, graph.groups, Calibration([x], [len(x)]))
    assert set(found) <= set(inside)
    assert found or name in ("llama", "hybrid", "beit")
    torch.testing.assert_close(evaluate(model, x), before, rtol=1e-3, atol=1e-3)
    assert bool(found) == any(not torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_turned_dimensions_come_in_order() -> None:
    """Of the heads of a head of rank 2, the first two dimensions are all there is."""
    model, x = ZOO["bert"].model().eval(), ZOO["bert"].inputs(batch=64)
    attention = model.block.attention
    with torch.no_grad():
        for layer in (attention.query, attention.value):
            heads = layer.weight.view(3, 4, 12)
            mix = torch.randn(3, 4, 2) @ torch.randn(3, 2, 4)
            layer.weight.copy_((mix @ heads).flatten(0, 1))
            layer.bias.copy_((mix @ layer.bias.view(3, 4, 1)).flatten())
    before = evaluate(model, x)
    graph = find_groups(model, x)
    (dims,) = (group for group in graph if group.level == 2)
    assert turn_heads(model, graph.groups, Calibration([x], [len(x)])) == [dims.name]
    remove(model, graph, [(dims, torch.tensor([2, 3]))])
    assert attention.attention_head_size == 2
    torch.testing.assert_close(evaluate(model, x), before, rtol=1e-2, atol=1e-2)


@attentive
def test_shrinks_in_closed_form(name: str) -> None:
    model, x = ZOO[name].model(), ZOO[name].inputs(batch=64)
    whole = evaluate(model, x)
    small = rlsprune.shrink(model, [x[:32], x[32:]], target={"params": 0.8})
    assert small.chosen.params <= 0.8 * small.front[0].params
    error = (evaluate(model, x) - whole).square().mean() / whole.var(0).mean()
    assert error < 0.6, "the refit left little of what the network said"


def test_gpt2_shrinks_as_the_same_network_of_linear_layers_does() -> None:
    """Its `Conv1D` keeps the weight as (in, out), and calls `addmm` on rows without their batch."""

    def linear(layer: nn.Module) -> nn.Linear:
        made = nn.Linear(layer.nx, layer.nf)
        made.weight, made.bias = nn.Parameter(layer.weight.detach().T.clone()), nn.Parameter(layer.bias.detach())
        return made

    torch.manual_seed(0)
    model, x = ZOO["gpt2"].model().double(), ZOO["gpt2"].inputs(batch=64).double()
    for layer in model.modules():
        if isinstance(layer, Conv1D):
            nn.init.normal_(layer.bias)
    twin = copy.deepcopy(model)
    for owner, name in ((twin.block.attention, "c_attn"), (twin.block.attention, "c_proj"), (twin.block, "fc1"),
                        (twin.block, "fc2")):  # fmt: skip
        setattr(owner, name, linear(getattr(owner, name)))
    assert torch.allclose(model(x), twin(x))
    found = [{(site.layer, site.sums) for site in find_sites(each, x).values()} for each in (model, twin)]
    assert found[0] == found[1]
    for each in (model, twin):
        rlsprune.shrink(each, [x[:32], x[32:]], target={"params": 0.8})
    assert sum(map(torch.numel, model.parameters())) == sum(map(torch.numel, twin.parameters()))
    torch.testing.assert_close(evaluate(model, x), evaluate(twin, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("criterion", ["obs", "l1", "rls"])
def test_pruner_takes_heads_by_every_criterion(criterion: str) -> None:
    model, x = ZOO["torch-attention"].model(), ZOO["torch-attention"].inputs(batch=32)
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = rlsprune.Pruner(model, optimizer, x[:2], criterion=criterion, ratio={"block.attention.inner[heads]": 0.4})
    model.train()
    model(x).square().mean().backward()
    event = pruner.prune()
    assert [len(units) for units in event.removed.values()] == [1]
    assert model.block.attention.inner.num_heads == 2
    assert model.block.attention.inner.in_proj_weight.shape == (24, 12)
    assert model.block.attention.inner.out_proj.weight.shape == (12, 8)


@pytest.mark.parametrize("name", ["gpt2", "torch-attention"])
def test_an_event_shows_heads_and_is_resumed_when_one_is_left(name: str) -> None:
    model, x = ZOO[name].model(), ZOO[name].inputs(batch=8)
    heads = next(group.name for group in find_groups(model, x) if group.name.endswith("[heads]"))
    options: dict[str, Any] = {"ratio": {heads: 0.67}, "criterion": "l1", "compensate": False, "warmup_epochs": 0}
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), 0.1), x[:2], **options)
    before = pruner.groups
    event = pruner.step(1.0)
    assert event is not None
    changes = {change.name: (change.before, change.after) for change in event.layers}
    assert changes[heads] == (next(group.size for group in before if group.name == heads), 1)
    assert f"{heads}  " in str(event)
    inside = [group.name for group in pruner.groups if group.level == 2]
    assert inside
    assert all(changes[part] == (4, 4) for part in inside)
    again = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), 0.1), x[:2], ratio=0.1, warmup_epochs=0)
    again.load_state_dict(pruner.state_dict())
    assert again.history == pruner.history


class MaskedAttention(nn.Module):
    """Self-attention under masks, which the whole encoder layer around it would not show."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(12, 3, batch_first=True, **options)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.inner(x, x, x, **options)[0]


_CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
_PADDED = torch.arange(5)[None, :] >= torch.tensor([5, 3])[:, None]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": _CAUSAL},
        {"attn_mask": torch.zeros(5, 5).masked_fill(_CAUSAL, -torch.inf)},
        {"key_padding_mask": _PADDED},
        {"attn_mask": _CAUSAL, "key_padding_mask": _PADDED},
    ],
    ids=["causal", "added", "padded", "both"],
)
def test_heads_go_under_masks(masks: dict[str, torch.Tensor], need_weights: bool) -> None:
    model, x = MaskedAttention().eval(), torch.rand(2, 5, 12)
    inputs = {"x": x, **masks, "need_weights": need_weights}
    graph = find_groups(model, inputs)
    assert {group.name: group.size for group in graph if group.attention} == {
        "inner[heads]": 3, "inner[keys]": 4, "inner[values]": 4
    }  # fmt: skip
    chosen = some_units(graph)
    with zeroed(chosen, model), torch.no_grad():
        wanted = model(**inputs)
    remove(model, graph, chosen)
    torch.testing.assert_close(model(**inputs), wanted, rtol=1e-5, atol=1e-5)


def test_heads_that_may_look_at_nothing_go() -> None:
    """The key and the value of zeros that they may look at belong to no layer."""
    model, x = MaskedAttention(add_zero_attn=True), torch.rand(2, 5, 12)
    graph = find_groups(model, x)
    assert {group.name for group in graph if group.attention} == {"inner[heads]", "inner[keys]", "inner[values]"}
    chosen = some_units(graph)
    with zeroed(chosen, model), torch.no_grad():
        wanted = model(x)
    remove(model, graph, chosen)
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)


def test_heads_that_stay_have_a_reason() -> None:
    """What the heads make is given away: no layer reads it."""

    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(12, 36), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
            return (query @ key.mT).softmax(-1) @ value + self.head(x[..., :5]).mean()

    graph = find_groups(Unread(), torch.rand(2, 5, 12))
    assert not [group for group in graph if group.attention]
    assert "no layer is known to read" in graph.skipped["qkv[heads]"]


def test_errors_count_as_they_are_behind_a_layer_norm() -> None:
    """A channel that is large in front of a layer norm, which makes it small again, does not hide the others."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    curves = []
    for size in (1.0, 1000.0):
        model = _PostNorm()
        with torch.no_grad():
            model.shortcut.weight[0] *= size
            model.norm.weight[0] /= size
        form = ClosedForm(model, x[:1], Calibration([x], [len(x)]))
        assert form.sites["fc2", 0].layer_norm == "norm"
        curves.append(form.curves["fc1"].costs)
    assert curves[1][-1] > 0.01 * curves[0][-1]


class _PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shortcut, self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(8, 12), nn.Linear(12, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.shortcut(x) + self.fc2(self.fc1(x).relu())))
