"""Widths of recurrent layers: what is cut is what is zeroed, and what cannot go has a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rlsprune
from rlsprune.graph import find_groups
from zoo import ZOO, evaluate, remove, some_units, zeroed_output


class Net(nn.Module):
    """Any forward over an embedding, a recurrent layer and a head."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell = nn.Linear(4, 6), nn.LSTM(6, 8, batch_first=True, **options)
        self.second, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        self.start = nn.Linear(4, 8)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


X = torch.randn(3, 5, 4)


def test_an_encoder_and_a_decoder_that_begins_with_its_state_go_together() -> None:
    model = Net(lambda self, x: self.head(self.second(self.embed(x), self.cell(self.embed(x))[1])[0].mean(1)))
    graph = find_groups(model, X)
    group = graph["cell"]
    assert {member.name for member in group.producers} == {"cell", "second"}
    chosen = [(group, torch.tensor([1, 4, 5]))]
    expected = zeroed_output(model, chosen, X)
    remove(model, graph, chosen)
    assert model.cell.hidden_size == model.second.hidden_size == 5
    torch.testing.assert_close(evaluate(model, X), expected)


def test_a_layer_that_makes_the_first_state_goes_with_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = self.start(x[:, 0]).unsqueeze(0)
        return self.head(self.cell(self.embed(x), (state, state))[0].mean(1))

    graph = find_groups(Net(forward), X)
    assert {member.name for member in graph["start"].producers} == {"cell", "start"}


def test_a_cut_layer_lays_its_weights_side_by_side_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it does on a GPU; on a CPU it can only be seen that it is called, when all weights have their new shapes.
    model = Net(lambda self, x: self.head(self.cell(self.embed(x))[0].mean(1)), num_layers=2)
    graph = find_groups(model, X)
    seen = []
    flatten = nn.LSTM.flatten_parameters

    def watched(layer: nn.LSTM) -> None:
        seen.append((layer, [tuple(weight.shape) for weight in layer.parameters()]))
        flatten(layer)

    monkeypatch.setattr(nn.LSTM, "flatten_parameters", watched)
    remove(model, graph, [(graph["embed"], torch.tensor([2])), (graph["cell"], torch.tensor([1, 4, 5]))])
    assert [layer for layer, _ in seen] == [model.cell, model.cell], "in each of the two cuts"
    layer, shapes = seen[-1]
    assert shapes == [tuple(weight.shape) for weight in model.cell.parameters()]
    assert all(kept is weight for kept, weight in zip(layer._flat_weights, layer.parameters(), strict=True))


FIXED = torch.randn(1, 3, 8)


@pytest.mark.parametrize(
    ("forward", "options", "name", "why"),
    [
        (
            lambda self, x: self.head(self.cell(self.embed(x), (FIXED, FIXED))[0].mean(1)),
            {},
            "cell",
            "cell begins with states of fixed width",
        ),
        (
            lambda self, x: self.head(
                pad_packed_sequence(
                    self.cell(pack_padded_sequence(self.embed(x), torch.tensor([5, 4, 2]), batch_first=True))[0],
                    batch_first=True,
                )[0].mean(1)
            ),
            {},
            "cell",
            "cell makes packed sequences, which are not followed",
        ),
        (
            lambda self, x: self.cell(self.embed(x))[0],
            {},
            "cell",
            "its channels reach the network's output",
        ),
    ],
)
def test_what_cannot_go_has_a_reason(forward: Any, options: dict[str, Any], name: str, why: str) -> None:
    graph = find_groups(Net(forward, **options), X)
    assert name not in [group.name for group in graph]
    assert why in graph.skipped[name]


def test_of_a_projected_lstm_the_inputs_alone_can_go() -> None:
    model = Net(lambda self, x: self.cell(self.embed(x))[0], proj_size=3)
    graph = find_groups(model, X, ignore=["input"])
    assert [group.name for group in graph] == ["embed"]
    remove(model, graph, [(graph["embed"], torch.tensor([0]))])
    assert model.cell.input_size == 5
    assert model(X).shape == (3, 5, 3)


@pytest.mark.parametrize("name", ["lstm", "gru-deep"])
def test_comes_back_from_a_file_is_exported_and_shrinks(name: str, tmp_path: Path) -> None:
    model, x = ZOO[name].model(), ZOO[name].inputs(batch=32)
    whole = copy.deepcopy(model)
    small = rlsprune.shrink(model, [x], target={"params": 0.7})
    assert small.chosen.params <= 0.7 * small.front[0].params
    assert model.recurrent.hidden_size < 6 or model.recurrent.input_size < 7
    rlsprune.save(model, tmp_path / "small.safetensors")
    fresh = rlsprune.load(tmp_path / "small.safetensors", into=whole)
    assert torch.equal(evaluate(fresh, x), evaluate(model, x))
    assert [group.size for group in find_groups(fresh, x)] == [group.size for group in find_groups(model, x)]


def test_states_that_make_little_go_first() -> None:
    model, x = ZOO["lstm"].model(), ZOO["lstm"].inputs()
    with torch.no_grad():
        for row in range(4):  # each gate of state 2
            model.recurrent.weight_ih_l0[6 * row + 2] *= 0.01
            model.recurrent.weight_hh_l0[6 * row + 2] *= 0.01
    ratio = {"recurrent": 0.17}
    pruner = rlsprune.Pruner(
        model, torch.optim.SGD(model.parameters(), 0.1), x, ratio=ratio, criterion="l1", compensate=False
    )
    assert pruner.prune().removed == {"recurrent": [2]}
    remove(model, find_groups(model, x), some_units(find_groups(model, x)))
    assert model(x).shape == (2, 5)


def test_an_event_shows_the_states_and_a_checkpoint_of_other_states_is_refused() -> None:
    def pruner_of(model: nn.Module) -> rlsprune.Pruner:
        return rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), X, ratio={"cell": 0.5})

    def make() -> Net:
        return Net(lambda self, x: self.head(self.cell(self.embed(x))[0].mean(1)))

    pruner = pruner_of(make())
    pruner.calibrate([X])
    event = pruner.prune()
    assert event is not None
    assert ("cell", 8, 4) in event.layers
    with pytest.raises(ValueError, match="4 channels in 'cell' after its last event, this one has 8"):
        pruner_of(make()).load_state_dict(pruner.state_dict())
