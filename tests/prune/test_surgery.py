"""Cuts in place: identities, hooks, optimizer state and copies survive, and training goes on as if nothing had gone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rlsprune
from rlsprune.graph import ChannelGraph, find_groups, plan_cuts
from rlsprune.prune.surgery import apply_cuts
from zoo import ZOO, evaluate, remove, some_units

GONE = torch.tensor([1, 3])
KEEP = [0, 2, 4, 5, 6]

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
# These look at whole rows or matrices, so losing a row changes the rest.
OTHERS: dict[str, Make] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OTHERS["muon"] = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01)


def two_layers(dead: bool = False) -> tuple[nn.Sequential, ChannelGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    if dead:
        with torch.no_grad():
            model[0].weight[GONE] = 0
            model[0].bias[GONE] = 0
            model[2].weight[:, GONE] = 0
    return model, find_groups(model, torch.randn(2, 4, dtype=torch.float64))


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :3] ** 2).square().mean()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("kind", [*ELEMENTWISE, *OTHERS])
def test_state_that_mirrors_a_parameter_is_cut_with_it(kind: str) -> None:
    model, graph = two_layers()
    optimizer = (ELEMENTWISE | OTHERS)[kind](model.parameters())
    train(model, optimizer, 3, seed=1)
    before = {p: copy.copy(state) for p, state in optimizer.state.items()}
    apply_cuts(model, plan_cuts([(graph["0"], GONE)]), optimizer)
    cut_dims = {model[0].weight: 0, model[0].bias: 0, model[2].weight: 1}
    cut = 0
    for parameter, dim in cut_dims.items():
        for key, old in before.get(parameter, {}).items():
            new = optimizer.state[parameter][key]
            if isinstance(old, Tensor) and old.ndim == parameter.ndim and old.shape[dim] == 7:
                assert torch.equal(new, old.index_select(dim, torch.tensor(KEEP))), key
                cut += 1
            else:
                assert new is old
    assert cut >= 2
    if model[2].bias in before:
        assert all(optimizer.state[model[2].bias][key] is old for key, old in before[model[2].bias].items())
    train(model, optimizer, 2, seed=2)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_training_goes_on_as_if_dead_units_had_stayed(kind: str) -> None:
    whole, _ = two_layers(dead=True)
    small, graph = two_layers(dead=True)
    optimizers = [ELEMENTWISE[kind](whole.parameters()), ELEMENTWISE[kind](small.parameters())]
    for model, optimizer in zip((whole, small), optimizers, strict=True):
        train(model, optimizer, 3, seed=1)
    apply_cuts(small, plan_cuts([(graph["0"], GONE)]), optimizers[1])
    losses = [train(m, o, 5, seed=2) for m, o in zip((whole, small), optimizers, strict=True)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(whole[0].weight[KEEP], small[0].weight, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(whole[2].weight[:, KEEP], small[2].weight, rtol=1e-10, atol=1e-13)


def test_entries_of_the_state_that_are_no_tensors_are_left_to_their_owner() -> None:
    model, graph = two_layers()
    optimizer = ELEMENTWISE["sgd"](model.parameters())
    matrices = [torch.eye(8).expand(1, 8, 8)]
    optimizer.state[model[2].weight]["inverse"] = matrices
    apply_cuts(model, plan_cuts([(graph["0"], GONE)]), optimizer)
    assert optimizer.state[model[2].weight]["inverse"] is matrices
    assert model[0].weight not in optimizer.state, "a parameter without state must not get an empty one"


def test_live_loss_hooks_flags_and_identities_survive() -> None:
    model, graph = two_layers()
    weight, calls = model[0].weight, []
    weight.register_hook(lambda grad: calls.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    model[0].register_forward_hook(lambda *_: calls.append("module"))
    model[2].bias.requires_grad_(False)
    optimizer = ELEMENTWISE["sgd"](model.parameters())
    alive = train(model, optimizer, 1, seed=1)
    parameters = list(model.parameters())
    calls.clear()
    apply_cuts(model, plan_cuts([(graph["0"], GONE)]), optimizer)
    assert weight.grad is None
    train(model, optimizer, 1, seed=2)
    assert calls == ["module", "tensor", "accumulated"]
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [p.requires_grad for p in parameters] == [True, True, True, False]
    assert weight.grad.shape == weight.shape == (5, 4)
    assert alive.grad_fn is not None


def test_old_tensors_are_not_written_to() -> None:
    model, graph = two_layers()
    old = [parameter.data for parameter in model.parameters()]
    values = [data.clone() for data in old]
    apply_cuts(model, plan_cuts([(graph["0"], GONE)]))
    model[0].weight.data.zero_()
    assert all(torch.equal(data, value) for data, value in zip(old, values, strict=True))


def test_memory_format_of_weights_and_state_stays() -> None:
    specimen = ZOO["vgg-bn"]
    model = specimen.model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(specimen.inputs()).sum().backward()
    optimizer.step()
    graph = find_groups(model, specimen.inputs())
    remove(model, graph, some_units(graph), optimizer)
    weight = model[0][3].weight
    for tensor in (weight, optimizer.state[weight]["momentum_buffer"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def test_buffers_stay_the_same_objects_and_are_cut() -> None:
    specimen = ZOO["vgg-bn"]
    model = specimen.model()
    graph = find_groups(model, specimen.inputs())
    mean = model[0][1].running_mean
    values = mean.clone()
    apply_cuts(model, plan_cuts([(graph["0.0"], [0, 5])]))
    assert model[0][1].running_mean is mean
    assert torch.equal(mean, values[[1, 2, 3, 4, 6, 7]])


def test_several_groups_in_one_plan_equal_one_after_the_other() -> None:
    specimen = ZOO["densenet"]
    one, two = specimen.model(), specimen.model()
    graphs = [find_groups(model, specimen.inputs()) for model in (one, two)]
    chosen = some_units(graphs[0])
    cuts = plan_cuts(chosen)
    apply_cuts(one, cuts)
    graphs[0].shrink(cuts)
    remove(two, graphs[1], chosen)
    for (name, tensor), other in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    for left, right in zip(*graphs, strict=True):
        assert all(torch.equal(a.index, b.index) for a, b in zip(left.members, right.members, strict=True))


def test_copies_are_cut_alike() -> None:
    specimen = ZOO["resnet-basic"]
    model, x = specimen.model(), specimen.inputs()
    plain = copy.deepcopy(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    graph = find_groups(model, x)
    apply_cuts(model, plan_cuts(some_units(graph)), copies=[plain, average])
    assert torch.equal(evaluate(plain, x), evaluate(model, x))
    assert torch.equal(evaluate(average, x), evaluate(model, x))
    average.update_parameters(model)


def test_a_copy_of_another_shape_is_refused_and_nothing_has_changed() -> None:
    model, graph = two_layers()
    other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    optimizer = ELEMENTWISE["sgd"](model.parameters())
    train(model, optimizer, 1, seed=1)
    before = [parameter.data.clone() for parameter in model.parameters()]
    cuts = plan_cuts([(graph["0"], GONE)])
    with pytest.raises(ValueError, match=r"0.weight of copy 1 .* has shape \(9, 4\), the plan is for shape \(7, 4\)"):
        apply_cuts(model, cuts, optimizer, copies=[other])
    with pytest.raises(ValueError, match=r"0.weight of copy 1 of the model is missing"):
        apply_cuts(model, cuts, optimizer, copies=[nn.Identity()])
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert model[0].out_features == 7
    assert optimizer.state[model[0].weight]["momentum_buffer"].shape == (7, 4)


def test_plan_refuses_units_that_do_not_exist() -> None:
    _, graph = two_layers()
    with pytest.raises(ValueError, match=r"0: units must lie in 0…6, got \[-1\]"):
        plan_cuts([(graph["0"], [-1])])
    with pytest.raises(ValueError, match="cannot remove all 7 units"):
        plan_cuts([(graph["0"], range(7))])
    assert plan_cuts([(graph["0"], [])]).tensors == {}


class _Preconditioned(torch.optim.SGD):
    """Keeps a matrix of the gradients' products, as Shampoo does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
            self.state[parameter]["G"] = rows @ rows.T


def test_state_that_cannot_be_cut_with_its_parameter_is_told_before_anything_is_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = _Preconditioned(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 6), ratio=0.5)
    model(torch.rand(16, 6)).square().sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"keeps 'G' of shape \(8, 8\) for '0\.\w+' of shape .* such as SGD"):
        pruner.prune()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not pruner.history
