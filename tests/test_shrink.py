"""A trained network goes in, the smallest that is good enough comes out."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import rlsprune
from rlsprune.shrinking import FrontPoint
from rlsprune.training.batches import OnDevice
from rlsprune.training.loop import evaluate

Batches = Sequence[tuple[Tensor, Tensor]]


def batches(seed: int, count: int = 16) -> Batches:
    """Points in a plane (and six features of noise), of which two classes lie inside and outside a circle."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 64, 8, generator=generator) * 2 - 1
    return [(x, (x[:, :2].square().sum(1) > 0.6).long()) for x in inputs]


def train(model: nn.Sequential) -> nn.Sequential:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        for inputs, labels in batches(0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture
def trained() -> nn.Module:
    torch.manual_seed(0)
    return train(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))


def accuracy(model: nn.Module) -> float:
    return evaluate(model, batches(1), nn.functional.cross_entropy).accuracy


def test_target_is_reached_and_the_front_goes_down_to_it(trained: nn.Module) -> None:
    shrunk = rlsprune.shrink(trained, batches(0), target={"params": 0.2}, valid=batches(1), recovery_epochs=1)
    sizes = [point.params for point in shrunk.front]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] <= 0.2 * sizes[0] < sizes[-2]
    assert shrunk.model is trained
    assert shrunk.chosen is shrunk.front[-1]
    assert sum(parameter.numel() for parameter in trained.parameters()) == sizes[-1]
    assert accuracy(trained) == shrunk.chosen.score > 85
    assert not trained.training
    assert str(shrunk).splitlines()[-1].endswith("this one")


def test_drop_is_kept_and_the_smallest_within_it_comes_back(trained: nn.Module) -> None:
    before = accuracy(trained)
    seen: list[FrontPoint] = []
    shrunk = rlsprune.shrink(
        trained,
        batches(0),
        max_drop=2.0,
        valid=batches(1),
        ratio=0.4,
        recovery_epochs=1,
        on_point=lambda point, model: seen.append(point),
    )
    assert tuple(seen) == shrunk.front
    assert shrunk.front[0].score == before
    assert shrunk.front[-1].score < before - 2.0, "it went on until it was too much"
    assert shrunk.chosen is shrunk.front[-2]
    assert accuracy(trained) == shrunk.chosen.score >= before - 2.0
    assert shrunk.chosen.params < shrunk.front[0].params


@pytest.mark.parametrize("allocate", [True, False])
def test_a_round_takes_from_the_layers_that_can_spare_it(allocate: bool) -> None:
    # The second hidden layer has sixteen units, each four times.
    torch.manual_seed(0)
    model = train(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)))
    wide = nn.Linear(64, 64), nn.Linear(64, 2)
    with torch.no_grad():
        for copied, (layer, dim) in zip(wide, ((model[2], 0), (model[4], 1)), strict=True):
            copied.weight.copy_(layer.weight.repeat_interleave(4, dim) / (4 if dim else 1))
            copied.bias.copy_(layer.bias if dim else layer.bias.repeat_interleave(4))
    model[2], model[4] = wide
    options = {"ratio": 0.25, "recovery_epochs": 0, "target": {"params": 0.7}, "allocate": allocate}
    shrunk = rlsprune.shrink(model, batches(0), valid=batches(1), **options)  # type: ignore[arg-type]
    assert (model[0].out_features > 1.5 * model[2].out_features) == allocate
    assert shrunk.chosen.params <= 0.7 * shrunk.front[0].params


def test_the_rate_of_recovery_falls_to_zero_in_every_round(trained: nn.Module) -> None:
    rates: list[float] = []
    scores = itertools.chain([0.0], itertools.count(-100.0))

    class Watched(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            rates.append(self.param_groups[0]["lr"])
            super().step()

    rlsprune.shrink(
        trained,
        batches(0),
        target={"params": 0.6},
        valid=batches(1),
        score=lambda network: next(scores),
        optimizer=lambda network: Watched(network.parameters(), lr=0.5),
        recovery_epochs=2,
    )
    rounds = len(rates) // 32
    assert rounds >= 2
    assert rates == pytest.approx([0.5 * (1 - step / 32) for step in range(32)] * rounds)


@pytest.mark.parametrize("count", [1, 7, 100, 640, 1000])
def test_a_sample_is_spread_evenly_over_the_batches(count: int) -> None:
    everything = torch.arange(640)
    given = [(part.unsqueeze(1), part) for part in everything.split(60)]
    sample = OnDevice(given, torch.device("cpu"), "valid").sample(count)
    labels = torch.cat([labels for _, labels in sample])
    assert count / 2 <= len(labels) <= count or len(labels) == 640
    assert labels.diff().unique().numel() <= 1
    assert 640 - labels[-1] <= 640 / len(labels)
    assert all(torch.equal(inputs[:, 0], labels) and len(labels) <= 60 for inputs, labels in sample)


def test_batches_that_cannot_be_joined_are_sampled_whole() -> None:
    lengths = [(torch.rand(4, 3, length), torch.zeros(4)) for length in range(5, 25)]
    flat = [(torch.rand(4, 3), torch.zeros(12)) for _ in range(20)]
    for given in (lengths, flat):
        sample = OnDevice(given, torch.device("cpu"), "valid").sample(20)
        assert [[part.shape for part in batch] for batch in sample] == [
            [part.shape for part in batch] for batch in given[::4]
        ]


def test_a_sample_does_not_keep_what_it_was_taken_from() -> None:
    given = [(torch.rand(64, 8), torch.zeros(64))]
    for part in OnDevice(given, torch.device("cpu"), "valid").sample(8)[0]:
        assert part.untyped_storage().nbytes() == part.nbytes


def test_a_loss_that_is_no_number_cannot_tell_where_to_cut(trained: nn.Module) -> None:
    def ignoring(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, torch.full_like(labels, -100))

    with pytest.raises(ValueError, match=r"the given network is nan.* allocate=False"):
        rlsprune.shrink(trained, batches(0), target={"params": 0.5}, valid=batches(1), loss=ignoring)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"target": {"params": 1.5}}, "target"), ({"ignore": ["nowhere"]}, "nowhere")],
)
def test_a_wrong_argument_leaves_no_hook(trained: nn.Module, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rlsprune.shrink(trained, batches(0), **{"target": {"params": 0.5}, "valid": batches(1), **wrong})  # type: ignore[arg-type]
    assert not any(layer._forward_hooks for layer in trained.modules())


def test_nothing_is_left_on_the_network(trained: nn.Module) -> None:
    shrunk = rlsprune.shrink(trained, batches(0), target={"flops": 0.5}, valid=batches(1), ignore=["0"])
    assert trained[0].out_features == 64
    assert not any(layer._forward_hooks for layer in shrunk.model.modules())


def test_recovery_that_diverges_gives_the_last_good_network_back(trained: nn.Module) -> None:
    before, weights = accuracy(trained), [parameter.clone() for parameter in trained.parameters()]

    def explosive(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e30)

    with pytest.raises(FloatingPointError, match="epoch 1, batch 2: the loss is nan"):
        rlsprune.shrink(trained, batches(0), max_drop=1.0, valid=batches(1), optimizer=explosive)
    assert accuracy(trained) == before
    assert all(torch.equal(kept, now) for kept, now in zip(weights, trained.parameters(), strict=True))


def test_own_score_decides(trained: nn.Module) -> None:
    # One that never drops: it ends where no layer has anything left to give, and says so.
    with pytest.warns(UserWarning, match="nothing was pruned"):
        shrunk = rlsprune.shrink(
            trained, batches(0), max_drop=0, valid=batches(1), score=lambda model: 1.0, recovery_epochs=0
        )
    assert shrunk.chosen.params < 0.05 * shrunk.front[0].params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give target, max_drop, or both"),
        ({"max_drop": -1.0}, "max_drop=-1.0"),
        ({"target": {"params": 0.5}, "recovery_epochs": -1}, "recovery_epochs=-1"),
        ({"target": {"params": 1.5}}, "1.5"),
    ],
)
def test_bad_arguments(trained: nn.Module, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rlsprune.shrink(trained, batches(0), valid=batches(1), **options)  # type: ignore[arg-type]


def test_no_batch_and_no_held_out_batches_are_said(trained: nn.Module) -> None:
    with pytest.raises(ValueError, match="data has no batch"):
        rlsprune.shrink(trained, [], target={"params": 0.5}, valid=batches(1))
    with pytest.raises(ValueError, match="valid has no batch"):
        rlsprune.shrink(trained, batches(0), target={"params": 0.5}, valid=[], allocate=False)
    with pytest.warns(UserWarning, match="held-out"):
        rlsprune.shrink(trained, batches(0, 2), target={"params": 0.9}, recovery_epochs=0)


@pytest.mark.parametrize("name", ["data", "valid"])
def test_batches_that_can_be_used_once_are_refused(trained: nn.Module, name: str) -> None:
    given = {"data": batches(0), "valid": batches(1), name: iter(batches(0))}
    with pytest.raises(ValueError, match=f"{name} can be gone through only once"):
        rlsprune.shrink(trained, target={"params": 0.5}, **given)  # type: ignore[arg-type]


def test_progress_is_told_batch_by_batch(trained: nn.Module) -> None:
    told: list[tuple[str, int, int | None]] = []
    shrunk = rlsprune.shrink(
        trained,
        batches(0),
        target={"params": 0.5},
        valid=batches(1),
        recovery_epochs=2,
        allocate=False,
        on_progress=lambda *stage: told.append(stage),
    )
    assert told[:2] == [("scoring", 0, None), ("round 1, pruning", 0, None)]
    assert [told_of for told_of in told if told_of[0] == "round 1, recovery epoch 1 of 2"] == [
        ("round 1, recovery epoch 1 of 2", number, 16) for number in range(1, 17)
    ]
    rounds = {stage.split(",")[0] for stage, _, _ in told} - {"scoring"}
    assert len(rounds) == len(shrunk.front) - 1
    assert sum(number == 16 for _, number, _ in told) == shrunk.front[-1].epochs
