"""The pruner where networks share, split, freeze, compile or keep things."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured
from torch.optim.swa_utils import AveragedModel

import rlsprune
from networks import fnn, train, trained
from rlsprune.prune import criteria


class TiedReaders(nn.Module):
    """Two layers read the same hidden units through one weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.d = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        if tied:
            self.d.weight, self.d.bias = self.c.weight, self.c.bias
        else:
            self.d.load_state_dict(self.c.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).relu()) + self.d(self.a(x * 0.5).relu())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: int = 8, count: int = 4) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.rand(64, inputs)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("statistics", ["exact", "training"])
def test_a_weight_that_two_layers_read_with_is_cut_and_refitted_once(statistics: str) -> None:
    model = TiedReaders()
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 8), criterion="obs", ratio=0.25, statistics=statistics)
    steps(model, optimizer)
    event = pruner.prune()
    assert model.c.weight is model.d.weight
    assert model.d.in_features == model.c.in_features == 16 - len(event.removed["a"])
    assert optimizer.inverse("c").shape == (model.c.in_features + 1,) * 2
    steps(model, optimizer)


class TwiceNamed(nn.Module):
    """One layer under two names, called under both, and one that a list holds too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.d = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 2)
        self.c, self.all = self.b, nn.ModuleList([self.a, self.d])

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


def test_a_layer_with_two_names_is_left_intact_and_pruned_once() -> None:
    model = TwiceNamed()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 6), criterion="l1", compensate=False, ratio=0.5)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert pruner.prune() is not None
    assert model.c is model.b
    assert model.b.weight.shape == (5, 5)
    assert model(torch.rand(3, 6)).shape == (3, 2)


def test_compensation_of_a_tied_weight_keeps_the_output() -> None:
    model = TiedReaders()
    with torch.no_grad():
        model.a.weight[8:], model.a.bias[8:] = model.a.weight[:8], model.a.bias[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = rlsprune.Pruner(
        model, optimizer, torch.rand(1, 8), ratio={"a": 0.5}, criterion=lambda g: [-torch.arange(float(g.size))]
    )
    inputs = torch.rand(256, 8)
    before = model(inputs).detach()
    pruner.calibrate([inputs])
    pruner.prune()
    assert (model(inputs) - before).square().mean() < 1e-3 * before.var()


def test_a_weight_tied_to_an_embedding_is_not_refitted() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(11, 12), nn.Linear(12, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).relu())

    model = Language()
    weight = model.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.randint(11, (8, 5))
    pruner = rlsprune.Pruner(model, optimizer, tokens, criterion="l1", ratio=0.5)
    pruner.calibrate([tokens])
    (gone,) = pruner.prune().removed.values()
    stay = [i for i in range(12) if i not in gone]
    assert torch.equal(model.embedding.weight, weight[:, stay])
    assert model.head.weight is model.embedding.weight


def test_training_statistics_need_layers_that_rls_trains() -> None:
    model = TiedReaders()
    model.d.bias = nn.Parameter(torch.zeros(3))  # shares the weight alone, so RLS leaves both to momentum SGD
    with pytest.warns(UserWarning, match="momentum SGD"):
        optimizer = rlsprune.RLS(model)
    with pytest.raises(ValueError, match=r"layer 'c' is not trained by RLS.*statistics='exact'"):
        rlsprune.Pruner(model, optimizer, torch.rand(1, 8), statistics="training")


def test_training_statistics_of_a_layer_that_was_never_trained_are_refused() -> None:
    model = fnn()
    model[2].requires_grad_(False)
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20), statistics="training", criterion="obs")
    train(model, optimizer, (20,), 2)
    with pytest.raises(RuntimeError, match=r"layer '2' has no P yet.*statistics='exact'"):
        pruner.prune()


@pytest.mark.parametrize("resume", [False, True])
def test_copies_are_rolled_back_with_the_model(resume: bool) -> None:
    model, optimizer = trained(fnn)
    options: dict[str, Any] = {"warmup_epochs": 0, "patience": 1, "statistics": "training", "criterion": "obs"}
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), **options)
    average = AveragedModel(model)
    pruner.follow(average)
    whole = copy.deepcopy(average.module.state_dict())
    pruner.step(1.0)
    if resume:
        state = pruner.state_dict()
        pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), **options)
        with pytest.raises(ValueError, match="followed 1 copies"):
            pruner.load_state_dict(state)
        pruner.follow(average)
        pruner.load_state_dict(state)
    average.update_parameters(model)
    pruner.step(2.0)
    torch.testing.assert_close(average.module.state_dict(), whole, rtol=0, atol=0)
    average.update_parameters(model)


@pytest.mark.parametrize("criterion", ["l1", "rls", "obs"])
def test_a_grouped_convolution_can_shrink_to_one_channel_per_group(criterion: str) -> None:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4), nn.ReLU()]
    model = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 3, 8, 8), ratio=0.5, criterion=criterion, patience=None)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.rand(16, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        pruner.preview()
        try:
            with pytest.warns(UserWarning, match="nothing was pruned"):
                assert pruner.prune() is None
        except pytest.fail.Exception:
            continue  # it pruned, without a warning
        break
    assert model[2].groups == 4
    assert model[2].out_channels == 4 or criterion == "rls"


def test_a_second_prune_needs_statistics_of_the_new_network() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), criterion="obs")
    pruner.calibrate([torch.rand(64, 20).double()])
    pruner.prune()
    with pytest.raises(RuntimeError, match="calibrate"):
        pruner.prune()


def test_nothing_is_sampled_once_pruning_has_ended() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double())
    pruner.stop()
    train(model, optimizer, (20,), 2)
    assert not any(collector._batches for collector in pruner._operation.evidence.sample._collectors.values())


def test_preview_and_prune_agree_near_a_target_and_beyond_it() -> None:
    model, optimizer = trained(fnn)
    options: dict[str, Any] = {"statistics": "training", "criterion": "obs", "target": {"params": 0.9}, "ratio": 0.5}
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), **options)
    for share in (0.9, 0.5):  # just to the target, then a whole event by hand
        preview = pruner.preview()
        event = pruner.prune()
        assert preview.params_after == event.params_after
        assert event.params_after <= share * pruner.history[0].params_before


def test_resuming_with_a_target_of_its_own() -> None:
    model, optimizer = trained(fnn)
    example = torch.rand(1, 20).double()
    state = rlsprune.Pruner(model, optimizer, example).state_dict()
    pruner = rlsprune.Pruner(model, optimizer, example, target={"params": 0.9}, warmup_epochs=0, statistics="training")
    pruner.load_state_dict(state)
    assert pruner.step(0.5) is not None


def test_a_model_that_keeps_an_activation_can_be_pruned_and_profiled() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x).relu()
            return self.second(self.hidden)

    model = Keeps()
    optimizer = rlsprune.RLS(model, lr=0.1)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 8), warmup_epochs=0)
    steps(model, optimizer)
    assert pruner.step(1.0) is not None
    assert rlsprune.profile(model, torch.rand(1, 8), min_seconds=0.01).params > 0


def test_ignore_may_be_any_iterable() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(
        model, optimizer, torch.rand(1, 20).double(), ignore=(name for name in ["0"]), warmup_epochs=0, patience=1
    )
    train(model, optimizer, (20,), 2)
    pruner.step(1.0)
    pruner.step(2.0)
    assert [group.name for group in pruner.groups] == ["input", "2"]


def test_parallel_branches_fold_in_their_own_batch_norms() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_a, self.conv_b = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3)
            self.bn_a, self.bn_b, self.head = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.conv_a(x), self.conv_b(x)
            return self.head((self.bn_a(a) + self.bn_b(b)).mean((2, 3)))

    model = Parallel()
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(2, 3, 5, 5), criterion="l1")
    (group,) = pruner.groups
    pairs = zip(group.producers, criteria._following_norms(group), strict=True)
    assert [(producer.name, norm.name) for producer, norm in pairs] == [("conv_a", "bn_a"), ("conv_b", "bn_b")]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(10, 8), nn.Linear(16, 2)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(u).relu(), self.b(v).relu()], -1))


def test_several_inputs_have_their_kept_features_by_name_and_calibrate_from_pairs() -> None:
    model = TwoInputs()
    example = {"u": torch.rand(1, 6), "v": torch.rand(1, 10)}
    pruner = rlsprune.Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), example, ratio={"input[v]": 0.3}, criterion="obs"
    )
    pruner.calibrate([({"u": torch.rand(32, 6), "v": torch.rand(32, 10)}, torch.zeros(32))])
    pruner.prune()
    kept = pruner.kept_inputs
    assert kept["input[u]"] is None
    assert len(kept["input[v]"]) == 7


def test_input_features_split_over_dimensions_are_left_alone() -> None:
    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x.view(-1, 2, 12)).relu().mean(1)).relu())

    model = Splits()
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(1, 24), criterion="l1")
    assert [group.name for group in pruner.groups] == ["first", "second"]


@pytest.mark.parametrize("when", ["before the optimizer", "after it"])
def test_a_compiled_model_trains_and_is_pruned(when: str) -> None:
    losses = {}
    for compiled in (False, True):
        torch.compiler.reset()
        model = fnn()
        call: Any = model
        inputs = torch.rand(32, 20, generator=torch.Generator().manual_seed(0))
        if compiled and when == "before the optimizer":
            call = torch.compile(model, backend="eager")
            call(inputs)
        optimizer = rlsprune.RLS(model, lr=0.1)
        pruner = rlsprune.Pruner(model, optimizer, inputs[:1], warmup_epochs=0, criterion="obs")
        if compiled and when == "after it":
            call = torch.compile(model, backend="eager")
        losses[compiled] = []
        for _ in range(3):
            for _ in range(3):
                optimizer.zero_grad()
                loss = (call(inputs) - 1).square().mean()
                loss.backward()
                optimizer.step()
                losses[compiled].append(loss.item())
            pruner.step(losses[compiled][-1])
        assert len(pruner.history) == 3
        assert optimizer.inverse("2").shape == (model[2].in_features + 1,) * 2
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_only_empty_batches_are_as_if_nothing_was_seen() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double())
    pruner.calibrate([torch.rand(0, 20).double()])
    with pytest.raises(RuntimeError, match=r"no input of layer .* was seen"):
        pruner.prune()


def test_a_network_that_something_else_has_changed_is_told() -> None:
    model, optimizer = trained(fnn)
    first, second = (rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), ratio=0.3) for _ in range(2))
    for pruner in (first, second):
        pruner.calibrate([torch.rand(64, 20).double()])
    assert first.prune() is not None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"'0\.weight' has the shape .*another pruner.*make a new Pruner"):
        second.prune()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model[2] = copy.deepcopy(model[2])
    with pytest.raises(RuntimeError, match="'2' was replaced by another layer"):
        first.prune()


def test_nothing_is_pruned_after_close() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double())
    pruner.calibrate([torch.rand(64, 20).double()])
    pruner.close()
    with pytest.raises(RuntimeError, match="closed"):
        pruner.prune()


def test_the_state_of_a_network_of_other_widths_is_refused() -> None:
    model, optimizer = trained(fnn)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 20).double(), warmup_epochs=0)
    train(model, optimizer, (20,), 2)
    assert pruner.step(0.5) is not None
    other, others = trained(fnn)
    whole = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    fresh = rlsprune.Pruner(other, others, torch.rand(1, 20).double(), warmup_epochs=0)
    with pytest.raises(ValueError, match="load the model of the same checkpoint"):
        fresh.load_state_dict(pruner.state_dict())
    assert fresh.history == []
    torch.testing.assert_close(other.state_dict(), whole, rtol=0, atol=0)


def test_an_event_inside_autocast_is_made_in_full_precision() -> None:
    models = [fnn(), fnn()]
    events = []
    for model, inside in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        inputs = torch.rand(64, first.in_features, generator=torch.Generator().manual_seed(0))
        pruner = rlsprune.Pruner(model, optimizer, inputs[:1])
        pruner.calibrate([inputs])
        model.eval()  # what training forwards say is sampled
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            model(inputs).sum().backward()  # autocast remembers these weights
            events.append(pruner.prune())
            model(inputs).sum().backward()
    assert events[0].removed == events[1].removed
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(16)], ids=["plain", "batch norm"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_held_out_loss_in_autocast_is_of_the_network_as_it_is_cut(norm: Any, outside: bool) -> None:
    asked = []
    for remembered in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), norm(), nn.ReLU(), nn.Linear(16, 4))
        inputs, labels = torch.randn(64, 8), torch.randint(4, (64,))
        losses: list[float] = []

        def held_out(model: nn.Module = model, remembered: bool = remembered, losses: list[float] = losses) -> float:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=remembered):
                losses.append(nn.functional.cross_entropy(model(inputs), labels).item())  # noqa: B023
            return losses[-1]

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = rlsprune.Pruner(model, optimizer, inputs[:1], ratio=0.5, held_out_loss=held_out)
        pruner.calibrate([inputs])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            model(inputs).sum().backward()
            assert pruner.prune() is not None
        held_out()
        asked.append(losses)
    assert asked[0] == asked[1]
    assert len(set(asked[0])) > 3


def test_a_parameter_that_was_replaced_is_told_before_anything_is_cut() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = rlsprune.RLS(model)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 6), ratio=0.5)
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    model[0].weight = nn.Parameter(torch.rand(8, 6))
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced by another parameter"):
        pruner.prune()
    assert model[0].weight.shape == (8, 6)


@pytest.mark.parametrize(
    "computed",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm of old", "weight_norm", "spectral_norm", "orthogonal", "masked"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_is_computed_is_left_alone_and_the_rest_is_pruned(computed: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), computed(nn.Linear(16, 16)), nn.Linear(16, 2)
    )
    pruner = rlsprune.Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(1, 8), target={"flops": 0.9}
    )
    pruner.calibrate([torch.rand(64, 8)])
    event = pruner.prune()
    assert "0" in event.removed
    assert not {"2", "4"} & set(event.removed)
    assert event.flops_after < event.flops_before
    assert model(torch.rand(3, 8)).shape == (3, 2)
