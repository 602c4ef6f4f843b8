"""Which units L1 norm, net slimming and DepGraph choose, each against a plain computation of its rule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_pruning
from torch import Tensor, nn

from app.baselines.cases import SHAPE, STRUCTURED, epoch, inputs, sgd, small
from rlsprune.app.baselines import DepGraph, L1Norm, NetSlimming, RandomChoice, initialise_scales
from rlsprune.app.baselines.common import Structured
from rlsprune.app.baselines.group_norm import group_norms
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.models import FNN
from rlsprune.graph import find_groups
from rlsprune.model.counts import count
from rlsprune.optim.rls import RLS
from zoo import ZOO

LAYERS = (0, 4, 9)  # of ``small``; each followed by its batch norm
READERS = {0: 4, 4: 9, 9: 12}


def lowest(scores: Tensor, number: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda unit: scores[unit].item())[:number])


def test_l1_norm_takes_the_filters_with_the_smallest_sum_of_absolute_weights() -> None:
    model = small()
    expected = {}
    for layer in LAYERS:
        norms = torch.stack([row.abs().sum() for row in model[layer].weight.detach().double()])
        expected[str(layer)] = lowest(norms, len(norms) - int(0.7 * len(norms)))
    event = L1Norm(model, sgd(model), inputs(), ratio=0.3, prune_epoch=1).end_epoch(1, 1.0)
    assert event is not None
    assert event.removed == expected
    assert {change.name: change.after for change in event.layers} == {"0": 5, "4": 8, "9": 11}


def test_l1_norm_ignores_scales_and_adds_up_over_the_producers_of_a_residual_stage() -> None:
    specimen = ZOO["resnet-basic"]
    model, x = specimen.model(), specimen.inputs()
    method = L1Norm(model, sgd(model), x, ratio=0.5, prune_epoch=1)
    place = [group.name for group in method.groups].index("stem.0")
    norms = sum(layer.weight.detach().abs().sum((1, 2, 3)) for layer in (model.stem[0], model.blocks[0].conv2))
    torch.testing.assert_close(method.scores()[place], norms)


def test_l1_norm_of_a_transposed_convolution_and_an_embedding_lies_along_their_own_dimension() -> None:
    up = nn.Sequential(nn.ConvTranspose2d(3, 6, 2), nn.ReLU(), nn.Conv2d(6, 2, 1))
    method = L1Norm(up, sgd(up), torch.randn(1, 3, 4, 4), ratio=0.5, prune_epoch=1)
    torch.testing.assert_close(method.scores()[0], up[0].weight.detach().abs().sum((0, 2, 3)))
    words = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 2))
    method = L1Norm(words, sgd(words), torch.tensor([[1, 2]]), ratio=0.5, prune_epoch=1)
    torch.testing.assert_close(method.scores()[0], words[0].weight.detach().abs().sum(0))


def test_net_slimming_has_one_threshold_over_convolutions_and_one_over_fully_connected_layers() -> None:
    model = small()
    scales = {layer: model[layer + 1].weight.detach().abs() for layer in LAYERS}
    # Position ⌊0.4·20⌋ of the 20 channels, and ⌊0.4·(16 + 5)⌋ of the nodes, the outputs among them.
    threshold = {0: torch.cat([scales[0], scales[4]]).sort().values[8], 9: scales[9].sort().values[8]}
    threshold[4] = threshold[0]
    kept = {layer: (scales[layer] > threshold[layer]).nonzero().flatten().tolist() for layer in LAYERS}
    rows = {layer: model[layer].weight.detach().clone() for layer in LAYERS}
    event = NetSlimming(model, sgd(model), inputs(), ratio=0.4, prune_epoch=1).end_epoch(1, 1.0)
    assert event is not None
    assert {change.name: change.after for change in event.layers} == {str(k): len(v) for k, v in kept.items()}
    for layer in LAYERS:
        assert torch.equal(model[layer + 1].weight.abs(), scales[layer][kept[layer]])
        assert len(model[layer].weight) == len(kept[layer]) == model[layer + 1].num_features
    assert torch.equal(model[0].weight, rows[0][kept[0]])


def test_net_slimming_leaves_one_channel_in_a_layer_below_the_threshold() -> None:
    model = small()
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
    best = int(model[1].weight.abs().argmax())
    event = NetSlimming(model, sgd(model), inputs(), ratio=0.6, prune_epoch=1).end_epoch(1, 1.0)
    assert event is not None
    assert event.removed["0"] == [unit for unit in range(8) if unit != best]
    assert model(inputs()).shape == (2, 5)


def test_net_slimming_adds_the_subgradient_until_it_prunes() -> None:
    model = small()
    optimizer = sgd(model)
    method = NetSlimming(model, optimizer, inputs(), ratio=0.5, prune_epoch=1, penalty=0.25)
    with torch.no_grad():
        model[1].weight[0] = 0

    def change() -> dict[str, Tensor]:
        model(inputs()).square().sum().backward()
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        method.after_backward()
        changes = {name: parameter.grad - before[name] for name, parameter in model.named_parameters()}
        optimizer.zero_grad()
        return changes

    for name, added in change().items():
        scale = name in ("1.weight", "5.weight", "10.weight")
        expected = 0.25 * model.get_parameter(name).sign() if scale else torch.zeros_like(added)
        torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
    method.end_epoch(1, 1.0)
    assert all(not added.any() for added in change().values())


def test_net_slimming_penalty_shrinks_the_scales_that_the_loss_does_not_need() -> None:
    sizes = {}
    for penalty in (0.0, 0.05):
        model = small()
        optimizer = sgd(model)
        method = NetSlimming(model, optimizer, inputs(), ratio=0.5, prune_epoch=None, penalty=penalty)
        for number in range(5):
            epoch(model, optimizer, method, SHAPE, seed=number)
        sizes[penalty] = sum(model[layer + 1].weight.abs().sum().item() for layer in LAYERS)
    assert sizes[0.05] < 0.8 * sizes[0.0]


def test_net_slimming_says_what_it_leaves_alone_and_refuses_a_network_without_batch_norm() -> None:
    specimen = ZOO["vgg-bn"]
    model = specimen.model()
    with pytest.warns(UserWarning, match=r"no batch norm scales 2\.0: net slimming leaves them unpruned"):
        method = NetSlimming(model, sgd(model), specimen.inputs(), ratio=0.5, prune_epoch=1)
    event = method.end_epoch(1, 1.0)
    assert event is not None
    assert {change.name for change in event.layers} == {"0.0", "0.3", "0.7"}
    plain = ZOO["vgg"].model()
    with pytest.raises(ValueError, match=r"no hidden layer has a batch norm .*build the network with batch norm"):
        NetSlimming(plain, sgd(plain), ZOO["vgg"].inputs(), ratio=0.5, prune_epoch=1)


def test_step_of_the_paper_is_stable_from_our_scales_only() -> None:
    """Momentum descent on a quadratic is stable for curvatures below 2·(1 + momentum) / lr."""
    torch.manual_seed(0)
    x, labels = torch.randn(128, 32), torch.randint(10, (128,))
    bound = 2 * (1 + 0.9) / 0.1
    for scale in (1.0, 0.5, 0.25):
        model = FNN((32, 64, 1024, 10), batch_norm=True)
        initialise_scales(model, scale)
        hidden = nn.Sequential(*list(model)[:-1])(x).detach()
        curvature = torch.linalg.eigvalsh(hidden @ hidden.T / len(x))[-1].item()
        assert (curvature < bound) == (scale == 0.25)
    optimizer = sgd(model)
    method = NetSlimming(model, optimizer, x, ratio=0.5, prune_epoch=None)
    losses = []
    for _ in range(40):
        loss = mean_squared_error(model(x), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        method.after_backward()
        optimizer.step()
    assert max(losses) < 2 * losses[0]
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ValueError, match="value=0"):
        initialise_scales(model, 0)


def squares(model: nn.Sequential, number: int) -> Tensor:
    """Squared norms of what makes, normalises and reads each unit of ``small``, averaged over the three layers."""
    own = model[number].weight.detach().flatten(1).square().sum(1)
    scale = model[number + 1].weight.detach().square()
    reader = model[READERS[number]].weight.detach().transpose(0, 1).flatten(1).square().sum(1)
    norm = (own + scale + reader.view(len(own), -1).sum(1)) / 3
    return norm / norm.mean()


def test_depgraph_scores_are_group_norms_of_all_that_goes_with_a_channel() -> None:
    model = small()
    graph = find_groups(model, inputs())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    for scores, layer in zip(group_norms(model, inputs(), graph.groups), LAYERS, strict=True):
        torch.testing.assert_close(scores, squares(model, layer))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_depgraph_takes_the_lowest_of_every_layer_or_of_the_network() -> None:
    for scope in ("layer", "network"):
        model = small()
        scores = {str(layer): squares(model, layer) for layer in LAYERS}
        if scope == "layer":
            expected = {name: lowest(own, len(own) // 2) for name, own in scores.items()}
        else:
            threshold = torch.cat(list(scores.values())).sort().values[17]
            expected = {name: (own <= threshold).nonzero().flatten().tolist() for name, own in scores.items()}
        method = DepGraph(model, sgd(model), inputs(), ratio=0.5, prune_epoch=1, scope=scope)
        event = method.end_epoch(1, 1.0)
        assert event is not None
        assert event.removed == expected


@pytest.mark.parametrize("name", ["small", "resnet-basic", "resnet-bottleneck"])
@pytest.mark.parametrize("scope", ["layer", "network"])
def test_depgraph_leaves_the_weights_that_torch_prunings_own_pruner_leaves(name: str, scope: str) -> None:
    model, x = (small(), inputs()) if name == "small" else (ZOO[name].model(), ZOO[name].inputs())
    theirs = copy.deepcopy(model)
    method = DepGraph(model, sgd(model), x, ratio=0.5, prune_epoch=1, scope=scope)
    method.end_epoch(1, 1.0)
    torch_pruning.pruner.GroupNormPruner(
        theirs,
        x,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        global_pruning=scope == "network",
        pruning_ratio=0.5,
        ignored_layers=[list(theirs.modules())[-1]],
    ).step()
    for (key, value), other in zip(model.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, other), key


@pytest.mark.parametrize("name", ["resnext", "densenet", "mobilenet", "inception"])
def test_depgraph_prunes_every_group_of_grouped_depthwise_and_concatenated_layers(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.model()
    method = DepGraph(model, sgd(model), specimen.inputs(), ratio=0.5, prune_epoch=1)
    event = method.end_epoch(1, 1.0)
    assert event is not None
    assert {change.name: change.after for change in event.layers} == {g.name: g.size // 2 for g in method.groups}
    assert model(specimen.inputs()).isfinite().all()


def test_random_choice_takes_as_many_as_l1_norm_and_depends_on_its_seed_alone() -> None:
    events = []
    for seed, state in ((0, 0), (0, 1), (1, 0)):
        model = small()
        torch.manual_seed(state)
        events.append(RandomChoice(model, sgd(model), inputs(), ratio=0.3, prune_epoch=1, seed=seed).end_epoch(1, 1.0))
    model = small()
    l1_norm = L1Norm(model, sgd(model), inputs(), ratio=0.3, prune_epoch=1).end_epoch(1, 1.0)
    assert all(event is not None and l1_norm is not None and event.layers == l1_norm.layers for event in events)
    same, again, other = (event.removed for event in events if event is not None)
    assert same == again != other


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("what", ["params", "flops"])
def test_the_ratio_is_the_least_that_reaches_a_target(name: str, what: str) -> None:
    full = dict(zip(("params", "flops"), count(small(), inputs()), strict=True))
    model = small()
    method = STRUCTURED[name](model, sgd(model), inputs())
    assert isinstance(method, Structured)
    method.target = {what: 0.4}
    method.end_epoch(2, 1.0)
    left = dict(zip(("params", "flops"), count(model, inputs()), strict=True))
    assert left[what] <= 0.4 * full[what]
    less = small()
    other = STRUCTURED[name](less, sgd(less), inputs())
    assert isinstance(other, Structured)
    other.ratio = method.ratio - 1e-5
    other.end_epoch(2, 1.0)
    assert dict(zip(("params", "flops"), count(less, inputs()), strict=True))[what] > 0.4 * full[what]


def test_a_target_below_one_unit_a_layer_is_refused() -> None:
    model = small()
    method = L1Norm(model, sgd(model), inputs(), ratio=0.5, prune_epoch=1, target={"params": 0.001})
    with pytest.raises(ValueError, match="even one unit per layer is more than that"):
        method.end_epoch(1, 1.0)


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("rank", [None, 4])
def test_p_of_rls_and_a_copy_are_cut_with_the_network(name: str, rank: int | None) -> None:
    model = small()
    optimizer = RLS(model, lr=0.1, rank=rank)
    average = copy.deepcopy(small())
    method = STRUCTURED[name](model, optimizer, inputs())
    method.follow(average)
    for number in (1, 2, 3):
        epoch(model, optimizer, method, SHAPE, number)
        method.end_epoch(number, 1.0)
    assert [p.shape for p in average.parameters()] == [p.shape for p in model.parameters()]
    for layer in LAYERS[1:]:
        weight = model[layer].weight
        assert optimizer.inverse(str(layer)).shape[-1] == weight[0].numel() + 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())
