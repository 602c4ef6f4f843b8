"""What the criteria measure, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from networks import SHAPES, cnn, fnn, train, trained
from rlsprune.graph import find_groups
from rlsprune.prune import criteria
from rlsprune.statistics.rows import sample_rows, weight_matrix
from zoo import ZOO


def rows_of(model: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """The input rows of a layer, bias's 1 included."""
    seen: list[Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_hook(lambda _, args, __: seen.append(args[0].detach()))
    model(inputs)
    handle.remove()
    rows, _ = sample_rows(layer, seen[0], 10**6, torch.Generator())
    return nn.functional.pad(rows, (0, 1), value=1.0)[0]


@pytest.mark.parametrize("make", [fnn, cnn])
def test_obs_is_the_output_error_left_after_the_best_refit(make: object) -> None:
    model, _ = trained(make)
    inputs = torch.rand(200, *SHAPES[make]).double()
    statistics = rlsprune.InputStatistics(model, damping=1e-12)
    # All rows, not a sample of them: the error is measured on the rows that P is of.
    inverses = {}
    for name in statistics._collectors:
        rows = rows_of(model, name, inputs)
        inverses[name] = [criteria_inverse(rows)]
    for group in find_groups(model, inputs[:2]):
        (scores,) = criteria.obs(group, inverses.__getitem__)
        (consumer,) = group.consumers
        rows, W = rows_of(model, consumer.name, inputs), weight_matrix(consumer.module)[0]
        taps = W.shape[0] // consumer.module.weight.shape[1]
        for unit in range(0, group.size, 5):
            gone = [int(c) * taps + t for c in consumer.index[unit] for t in range(taps)]
            stay = [i for i in range(len(W)) if i not in gone]
            refit = torch.linalg.lstsq(rows[:, stay], rows @ W, driver="gelsd").solution
            error = (rows @ W - rows[:, stay] @ refit).square().sum() / len(rows)
            assert scores[unit].item() == pytest.approx(error.item(), rel=1e-3, abs=1e-9)


def criteria_inverse(rows: Tensor) -> object:
    from rlsprune.statistics.inverse import from_rows

    return from_rows(rows, 1e-10)


def test_l1_is_the_norm_of_the_weights_that_make_a_unit() -> None:
    model, _ = trained(cnn)
    groups = {group.name: group for group in find_groups(model, torch.rand(2, 3, 8, 8).double())}
    for name in ("0", "3", "6"):
        (score,) = criteria.l1(groups[name])
        torch.testing.assert_close(score, model.get_submodule(name).weight.data.flatten(1).abs().sum(1))


def test_l1_of_input_features_is_that_of_the_weights_that_read_them() -> None:
    model, _ = trained(fnn)
    (score,) = criteria.l1(find_groups(model, torch.rand(2, 20).double())["input"])
    torch.testing.assert_close(score, model[0].weight.data.abs().sum(0))


def test_the_batch_norm_behind_a_layer_scales_its_norms() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.stem_bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem_bn(self.stem(x)).relu()
            x = (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model = Residual()
    for norm in (model.stem_bn, model.bn1, model.bn2):
        nn.init.uniform_(norm.weight, 0.1, 2)
        norm.running_var.uniform_(0.5, 2)
    groups = {group.name: group for group in find_groups(model, torch.rand(2, 3, 8, 8))}

    def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
        return (conv.weight.detach().flatten(1).abs().sum(1) * norm.weight.detach()).double()

    torch.testing.assert_close(criteria.l1(groups["conv1"])[0], folded(model.conv1, model.bn1), rtol=1e-5, atol=0)
    parts = [folded(model.stem, model.stem_bn), folded(model.conv2, model.bn2)]
    expected = torch.stack([part / part.mean() for part in parts]).mean(0)
    torch.testing.assert_close(criteria.l1(groups["stem"])[0], expected, rtol=1e-5, atol=0)


def test_several_consumers_count_alike_whatever_their_scale() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x).relu()
            return self.a(hidden), self.b(hidden)

    torch.manual_seed(0)
    model = Two().double()
    statistics = rlsprune.InputStatistics(model)
    model(torch.rand(100, 5).double())
    group = find_groups(model, torch.rand(2, 5).double())["first"]
    before = criteria.obs(group, statistics.inverses)[0]
    with torch.no_grad():
        model.b.weight.mul_(100)
    torch.testing.assert_close(criteria.obs(group, statistics.inverses)[0], before)


def test_a_users_criterion_sees_the_group_and_decides() -> None:
    model, optimizer = trained(fnn)
    seen = []

    def last_ones(group: rlsprune.Group) -> list[Tensor]:
        seen.append((group.name, group.size, group.is_input, [m.name for m in group.consumers]))
        return [-torch.arange(float(group.size))]

    pruner = rlsprune.Pruner(
        model, optimizer, torch.rand(2, 20).double(), criterion=last_ones, compensate=False, ratio=0.25, input_ratio=0.1
    )
    event = pruner.prune()
    assert seen == [("input", 20, True, ["0"]), ("0", 24, False, ["2"]), ("2", 16, False, ["4"])]
    assert event.removed == {"input": [18, 19], "0": [18, 19, 20, 21, 22, 23], "2": [12, 13, 14, 15]}
    assert pruner.kept_inputs.tolist() == list(range(18))
    train(model, optimizer, (20,), 2)


@pytest.mark.parametrize("statistics", ["exact", "training"])
def test_of_channels_that_stand_in_for_each_other_obs_leaves_one(statistics: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        # Units 0, 1 and 2 are the same; each scores nothing as long as another is there. Unit 5 says little by itself.
        for unit in (1, 2):
            model[0].weight[unit], model[0].bias[unit] = model[0].weight[0], model[0].bias[0]
        model[0].bias += 1  # all units are active
        model[2].weight[:] = torch.tensor([1.0, 1.0, 1.0, 2.0, -2.0, 0.5])
    optimizer = rlsprune.RLS(model, lr=1e-9, momentum=0.0, p0=1e3, mean_scale=1.0)
    options = {"criterion": "obs", "statistics": statistics, "ratio": 0.5, "input_ratio": 0}
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(2, 6).double(), **options)
    inputs = torch.rand(256, 6).double()
    for batch in inputs.split(1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    before = model(inputs)
    removed = pruner.prune().removed["0"]
    assert 5 in removed
    assert len({0, 1, 2} & set(removed)) == 2
    assert (model(inputs) - before).abs().max() < 0.1 * before.abs().max()


def test_the_width_of_experts_is_scored_by_the_weights_of_all_of_them() -> None:
    model = ZOO["mixture"].model()
    group = find_groups(model, ZOO["mixture"].inputs())["block.attention.experts"]
    experts = group.producers[0].module
    gates, ups = experts.gate_up_proj.detach().double().chunk(2, 1)
    made = (gates.abs() + ups.abs()).sum((0, 2)).view(3, 8).sum(1)  # three units of eight
    read = experts.down_proj.detach().double().square().sum((0, 1)).view(3, 8).sum(1)
    assert torch.allclose(criteria.l1(group)[0], made)
    assert torch.allclose(criteria.obs(group, {}.__getitem__)[0], read)
