"""The state of a run in a file: everything comes back, and nothing else is let in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rlsprune
from rlsprune.io import tensorfile
from rlsprune.io.atomic import FileError
from rlsprune.io.state import load_state, save_state

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TENSORS = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3),
        torch.zeros(0, 4),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.rand(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last),
        torch.rand(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.get_rng_state()[:16],
    ]
)
STATES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=4) | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
            and one.stride() == other.stride()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), STATES, max_size=3))
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("state") / "state"
    save_state(path, state)
    assert same(load_state(path), state)


def test_optimizers_and_pruners_come_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = rlsprune.RLS(model)
    pruner = rlsprune.Pruner(model, optimizer, torch.rand(1, 8), warmup_epochs=0, ratio=0.5)
    model(torch.rand(16, 8)).square().mean().backward()
    optimizer.step()
    pruner.step(1.0)
    state = {"optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert same(loaded, state)
    optimizer.load_state_dict(loaded["optimizer"])
    pruner.load_state_dict(loaded["pruner"])


@pytest.mark.parametrize("odd", [object(), {1}, torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.complex64), len])
def test_what_is_not_plain_is_refused_with_its_place(tmp_path: Path, odd: object) -> None:
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] is .* not kept"):
        save_state(tmp_path / "state", {"a": [0, odd]})
    assert not list(tmp_path.iterdir())


BAD = {
    "no object": [],
    "two keys": {"dict": [], "tuple": []},
    "no list": {"dict": {}},
    "an unknown kind": {"object": []},
    "a list as key": {"dict": [[[1], 2]]},
    "a key twice": {"dict": [["a", 1], ["a", 2]]},
    "a lone key": {"dict": [["a"]]},
    "a tensor that is not there": {"dict": [["a", {"tensor": ["7", "contiguous"]}]]},
    "a tensor twice": {"dict": [["a", {"tensor": ["0", "contiguous"]}], ["b", {"tensor": ["0", "contiguous"]}]]},
    "a tensor left over": {"dict": []},
    "an odd format": {"dict": [["a", {"tensor": ["0", "sparse"]}]]},
    "a format for other dimensions": {"dict": [["a", {"tensor": ["0", "channels_last"]}]]},
    "a number for a name": {"dict": [["a", {"tensor": [0, "contiguous"]}]]},
}


@pytest.mark.parametrize("case", BAD)
def test_containers_that_are_not_ours_are_refused(tmp_path: Path, case: str) -> None:
    """Signed as ours are: a checksum keeps out accidents, not people."""
    path = tmp_path / "state"
    tensorfile.write(path, "rlsprune-state", json.dumps(BAD[case]), {"0": torch.zeros(3)})
    with pytest.raises(FileError) as caught:
        load_state(path)
    assert str(path) in str(caught.value)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    for depth in (900, 100_000):
        text = '{"tuple": [' * depth + "]}" * depth
        tensorfile.write(tmp_path / "state", "rlsprune-state", text, {})
        with pytest.raises(FileError):
            load_state(tmp_path / "state")
