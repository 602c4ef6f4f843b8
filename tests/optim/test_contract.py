"""RLS keeps the contract of torch.optim.Optimizer: one test per feature."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import rlsprune
from rlsprune.model.attention import open_attention


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        images = torch.rand(8, 2, 6, 6, generator=generator)
        optimizer.zero_grad()
        loss = (model(images) - images.mean((1, 2, 3))[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_parameters(first: nn.Module, second: nn.Module) -> None:
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_one_optimizer_trains_every_parameter_of_a_mixed_network() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    losses = train(model, rlsprune.RLS(model, lr=0.5), 30)
    assert losses[-1] < losses[0] / 10
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(p, q), name


def test_groups_are_named_layers_and_one_fallback() -> None:
    optimizer = rlsprune.RLS(make_model(), lr=0.7, fallback_lr=0.03)
    assert [(g["name"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        ("0", 0.7, 2),
        ("4", 0.7, 2),
        ("6", 0.7, 2),
        ("fallback", 0.03, 2),
    ]


def test_fallback_is_torchs_momentum_sgd() -> None:
    norm, twin = nn.LayerNorm(5), nn.LayerNorm(5)
    ours = rlsprune.RLS(norm, momentum=0.9, fallback_lr=0.05)
    torchs = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        inputs = torch.rand(3, 5)
        for model, optimizer in ((norm, ours), (twin, torchs)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(dict(norm.named_parameters()), dict(twin.named_parameters()))


def test_added_groups_are_trained_by_momentum_sgd() -> None:
    model, extra = make_model(), nn.Parameter(torch.ones(3))
    optimizer = rlsprune.RLS(model, fallback_lr=0.03, momentum=0.0)
    optimizer.add_param_group({"params": [extra]})
    (2 * extra).sum().backward()
    optimizer.step()
    torch.testing.assert_close(extra.data, torch.full((3,), 1 - 0.06))


@pytest.mark.parametrize(
    "schedule", [lambda o: CosineAnnealingLR(o, 10), lambda o: OneCycleLR(o, [1.0, 1.0, 1.0, 0.1], total_steps=10)]
)
def test_schedulers_move_every_group(schedule: object) -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[0][0] != rates[1][0] != rates[2][0]
    assert rates[0][0] == pytest.approx(10 * rates[0][-1])


def test_learning_rate_zero_moves_nothing_but_p() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model, lr=0.0, fallback_lr=0.0)
    before = copy.deepcopy(model)
    train(model, optimizer, 2)
    assert_same_parameters(model, before)
    assert not torch.equal(optimizer.inverse("4"), torch.eye(65))


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    model = nn.Linear(3, 1)
    optimizer = rlsprune.RLS(model, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) - 1).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_dict_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model, dtype=dtype, forgetting=0.99)
    train(model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    resumed = make_model()
    other = rlsprune.RLS(resumed, dtype=dtype)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["forgetting"] == 0.99
    assert other.inverse("4").dtype == dtype
    assert train(model, optimizer, seed=2) == train(resumed, other, seed=2)
    assert_same_parameters(model, resumed)


def test_state_dict_loads_in_a_new_process(tmp_path: Path) -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    script = (
        "import sys, torch, rlsprune; sys.path.insert(0, sys.argv[1]); import test_contract as t\n"
        "torch.set_num_threads(1)\n"
        "saved = torch.load(sys.argv[2], weights_only=True); model = t.make_model(); optimizer = rlsprune.RLS(model)\n"
        "model.load_state_dict(saved['model']); optimizer.load_state_dict(saved['optimizer'])\n"
        "sys.stdout.write(repr(t.train(model, optimizer, seed=2)))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "checkpoint.pt")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == repr(train(model, optimizer, seed=2))


def test_state_of_another_network_is_refused_and_nothing_changes() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"layers \['0', '4', '6', 'fallback'\], this optimizer \['0'\]"):
        rlsprune.RLS(other).load_state_dict(optimizer.state_dict())
    wider = make_model()
    wider[4], wider[6] = nn.Linear(64, 30), nn.Linear(30, 3)
    target = rlsprune.RLS(wider)
    with pytest.raises(ValueError, match=r"layer '4'.*\(20, 64\).*\(30, 64\)"):
        target.load_state_dict(optimizer.state_dict())
    assert not target.state


def test_deepcopy_of_model_and_optimizer_together_trains_on_alone() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model)
    losses = train(twin, twin_optimizer, seed=2)
    assert_same_parameters(model, before)
    assert losses == train(model, optimizer, seed=2)
    assert_same_parameters(model, twin)
    twin_optimizer.close()
    assert not twin[0]._forward_hooks
    assert model[0]._forward_hooks


def test_deepcopy_of_the_model_alone_is_left_out() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    average = copy.deepcopy(model)
    average(torch.rand(4, 2, 6, 6)).sum().backward()
    assert all(recorder.mean is None for recorder in optimizer._recorders.values())


def test_pickled_together_they_train_on_as_before() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert train(twin, twin_optimizer, seed=2) == train(model, optimizer, seed=2)


def test_close_removes_the_only_hook() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    assert [len(module._forward_hooks) for module in model] == [1, 0, 0, 0, 1, 0, 1]
    optimizer.close()
    optimizer.close()
    assert not any(module._forward_hooks for module in model)
    assert optimizer.inverse("4").shape == (65, 65)
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def test_a_dropped_model_and_optimizer_are_freed_without_the_cycle_collector() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer)
    dead = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        # torch's own step and state-dict hooks are all that Optimizer holds on to itself.
        assert [ref() for ref in dead] == [None, None, None]
    finally:
        gc.enable()


def test_a_dead_optimizer_leaves_an_idle_hook() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    del optimizer
    gc.collect()
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert losses[1] < losses[0]


def test_a_model_moved_after_construction_takes_its_state_along() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    train(model, optimizer, 2)
    model.double()
    generator = torch.Generator().manual_seed(0)
    optimizer.zero_grad()
    model(torch.rand(4, 2, 6, 6, generator=generator).double()).square().mean().backward()
    optimizer.step()
    assert model[4].weight.dtype == torch.float64


def test_tied_layers_are_one_layer_with_the_inputs_of_both() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.ReLU(), second)
    optimizer = rlsprune.RLS(model)
    assert [group["name"] for group in optimizer.param_groups] == ["0"]
    inputs = torch.rand(6, 4)
    hidden = model[:2](inputs)
    model(inputs).sum().backward()
    expected = torch.cat([inputs, hidden]).mean(0)
    torch.testing.assert_close(optimizer._recorders["0"].mean[0, :-1], expected.detach())


def test_layers_rls_cannot_know_go_to_the_fallback_with_a_warning() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.normed(self.embedding(tokens))
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    model = Tied()
    with pytest.warns(UserWarning, match="trained by momentum SGD") as caught:
        optimizer = rlsprune.RLS(model)
    messages = " ".join(str(w.message) for w in caught)
    assert all(f"layer {name!r}" in messages for name in ("head", "attention.out_proj", "normed"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randint(7, (2, 5))).square().sum().backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.grad.abs().sum() > 0}


def test_the_projection_of_an_opened_attention_is_left_out_for_a_reason_that_holds() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    open_attention(model)
    with pytest.warns(UserWarning, match=r"layer '0\.out_proj' .* is a part of nn\.MultiheadAttention, which need not"):
        rlsprune.RLS(model)


def test_a_layer_without_a_gradient_keeps_everything() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    optimizer = rlsprune.RLS(model)
    for name in ("idle", "used"):
        model[name](torch.rand(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if name == "idle":
            idle = copy.deepcopy((model["idle"].state_dict(), optimizer.inverse("idle")))
    torch.testing.assert_close((model["idle"].state_dict(), optimizer.inverse("idle")), idle, rtol=0, atol=0)


def test_frozen_layers_cost_nothing_and_can_be_thawed() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = rlsprune.RLS(model)
    inputs = torch.rand(4, 3)
    model(inputs).square().sum().backward()
    optimizer.step()
    assert model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    model(inputs).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_a_state_with_an_added_group_loads() -> None:
    optimizers = []
    for _ in range(2):
        model, extra = make_model(), nn.Parameter(torch.ones(3))
        optimizer = rlsprune.RLS(model)
        optimizer.add_param_group({"params": [extra]})
        optimizers.append(optimizer)
    extra.sum().backward()
    optimizers[1].step()
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    (state,) = optimizers[0].state.values()
    torch.testing.assert_close(state["velocity"], torch.full((3,), -0.1))


def test_a_frozen_weight_gathers_no_speed_while_its_bias_trains() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    optimizer = rlsprune.RLS(layer)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
    assert optimizer.state[layer.weight]["velocity"].abs().max() == 0
    assert optimizer.state[layer.bias]["velocity"].abs().max() > 0


def test_a_frozen_bias_stays_while_its_weight_trains() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    bias, weight = layer.bias.clone(), layer.weight.detach().clone()
    optimizer = rlsprune.RLS(layer)
    layer(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    assert torch.equal(layer.bias, bias)
    assert not torch.equal(layer.weight, weight)


def test_a_weight_used_without_its_module_is_trained_by_sgd_with_one_warning() -> None:
    layer = nn.Linear(3, 2, bias=False)
    optimizer = rlsprune.RLS(layer, fallback_lr=0.5, momentum=0.0)
    before = layer.weight.detach().clone()
    nn.functional.linear(torch.ones(1, 3), layer.weight).sum().backward()
    with pytest.warns(UserWarning, match="module was not called") as told:
        optimizer.step()
    assert told[0].filename == __file__, "it points at the line that took the step"
    torch.testing.assert_close(layer.weight.data, before - 0.5)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_p_in_float32_and_trains(dtype: torch.dtype) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    reference_optimizer = rlsprune.RLS(reference, lr=0.1)
    train(reference, reference_optimizer, 3)
    optimizer = rlsprune.RLS(model, lr=0.1)
    with torch.autocast("cpu", dtype=dtype):
        losses = train(model, optimizer, 3)
    # The first layer's input is the same float32 image; the others see activations in half precision.
    for name, tolerance in (("0", 1e-6), ("4", 0.03), ("6", 0.03)):
        assert optimizer.inverse(name).dtype == torch.float32
        torch.testing.assert_close(optimizer.inverse(name), reference_optimizer.inverse(name), rtol=0, atol=tolerance)
    assert losses[-1] < losses[0]


def test_bfloat16_weights_have_a_float32_p_that_survives_loading() -> None:
    layer = nn.Linear(3, 2).bfloat16()
    optimizer = rlsprune.RLS(layer)
    layer(torch.rand(4, 3).bfloat16()).square().sum().backward()
    optimizer.step()
    other = rlsprune.RLS(copy.deepcopy(layer))
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.inverse(""), optimizer.inverse(""))
    assert other.inverse("").dtype == torch.float32


def test_the_global_random_state_is_untouched() -> None:
    model = make_model()
    optimizer = rlsprune.RLS(model)
    images = torch.rand(4, 2, 6, 6)
    state = torch.get_rng_state()
    model(images).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, r"momentum=1.0 .* \[0, 1\)"),
        ({"forgetting": 0.0}, r"forgetting=0.0 .* \(0, 1\]"),
        ({"forgetting": 1.5}, "forgetting=1.5"),
        ({"mean_scale": 0.0}, "mean_scale=0.0"),
        ({"p0": float("nan")}, "p0=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"rank": 0}, "rank=0"),
        ({"fallback_lr": -0.1}, "fallback_lr=-0.1"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"on_fault": "ignore"}, "on_fault='ignore'"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rlsprune.RLS(nn.Linear(2, 2), **options)


def test_bad_models_are_named() -> None:
    with pytest.raises(TypeError, match=r"not model\.parameters\(\)"):
        rlsprune.RLS(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="unfreeze"):
        rlsprune.RLS(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"'0\.weight' of the model has no shape yet"):
        rlsprune.RLS(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)))
    with pytest.raises(KeyError, match="'9'; there are '0', '4', '6'"):
        rlsprune.RLS(make_model()).inverse("9")
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = rlsprune.RLS(embedding)
    embedding(torch.tensor([0])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_layers_without_inputs_or_outputs_are_left_to_momentum_sgd() -> None:
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4))
    with pytest.warns(UserWarning, match="it has no inputs, or no outputs"):
        optimizer = rlsprune.RLS(model, fallback_lr=0.5, momentum=0.0)
    before = model[1].bias.detach().clone()
    model(torch.rand(5, 8)).sum(1).mean().backward()
    optimizer.step()
    torch.testing.assert_close(model[1].bias.data, before - 0.5)


def test_a_layer_resized_by_hand_is_named() -> None:
    for cut in (lambda weight: weight[:, :3], lambda weight: weight[:3]):
        model = nn.Linear(5, 4, bias=False)
        optimizer = rlsprune.RLS(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(6, model.weight.shape[1])).square().sum().backward()
            if model.weight.numel() == 20:
                optimizer.step()
                model.weight.data = cut(model.weight.data).clone()
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"layer '' was resized: its (P|velocity) has size .* new optimizer"):
            optimizer.step()
        assert torch.equal(model.weight, before)
