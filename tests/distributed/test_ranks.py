"""Two processes, each with half of every batch, do what one does with all of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import rlsprune
from distributed import fsdp, launch, scenarios
from distributed.runs import OPTIONS
from distributed.runs import agree as agree_runs
from rlsprune.app.cli.main import main


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return scenarios.equal_runs(Path())["plain"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch.run(2, "distributed.scenarios:equal_runs", tmp_path_factory.mktemp("two"))


def agree(run: dict[str, Any], alone: dict[str, Any]) -> None:
    assert run["removed"] == alone["removed"]
    for kind in ("weights", "inverse"):
        torch.testing.assert_close(run[kind], alone[kind], rtol=0, atol=1e-5)


def shapes(entries: dict[str, Any]) -> Any:
    return tree_map(lambda value: value.shape if isinstance(value, torch.Tensor) else value, entries)


@pytest.mark.parametrize("case", scenarios.CASES)
def test_two_ranks_do_what_one_does(alone: Any, two: Any, case: str) -> None:
    for rank in two:
        agree(rank["plain"][case], alone[case])


@pytest.mark.parametrize("case", scenarios.CASES)
def test_ranks_are_the_same_to_the_bit(two: Any, case: str) -> None:
    first, second = two
    for kind in ("weights", "inverse"):
        torch.testing.assert_close(first["plain"][case][kind], second["plain"][case][kind], rtol=0, atol=0)


@pytest.mark.parametrize("case", scenarios.CASES)
def test_a_state_goes_from_any_number_of_ranks_to_any_other(alone: Any, two: Any, case: str) -> None:
    for rank in two:
        torch.testing.assert_close(rank["plain"][case]["resumed"], rank["plain"][case]["went on"], rtol=0, atol=0)
        # One process loads it as its own.
        state, expected = (run[case]["state"]["state"] for run in (rank["plain"], alone))
        assert state.keys() == expected.keys()
        for mine, theirs in zip(state.values(), expected.values(), strict=True):
            torch.testing.assert_close(mine["velocity"], theirs["velocity"], rtol=0, atol=1e-5)
            assert shapes(mine) == shapes(theirs)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", "lr of group '0': rank 0 has 0.1, rank 1 has 1.1"),
        ("shapes", r"params of group '': rank 0 has \[\(2, 3\), \(2,\)\], rank 1 has \[\(2, 4\), \(2,\)\]"),
        ("P", "optimizer's 'inverse' of '2.weight'"),
        ("chosen", "which channels of .* go: rank 0 has"),
    ],
)
def test_ranks_that_differ_stop(two: Any, what: str, message: str) -> None:
    for rank in two:
        assert re.search(message, rank["guards"][what])


def test_a_network_divided_by_fully_shard_trains_to_the_same_numbers(two: Any) -> None:
    alone = fsdp.divided_run(Path())
    assert sum(rank["fsdp"]["velocity"] for rank in two) == alone["velocity"]
    for rank in two:
        run = rank["fsdp"]
        torch.testing.assert_close(run["weights"], alone["weights"], rtol=0, atol=1e-6)
        torch.testing.assert_close(run["inverse"], alone["inverse"], rtol=0, atol=1e-6)
        torch.testing.assert_close(run["resumed"], run["went on"], rtol=0, atol=0)


@pytest.mark.parametrize("case", fsdp.PRUNED)
def test_a_divided_network_is_pruned_as_a_whole_one_is(two: Any, case: str) -> None:
    alone = fsdp.pruned_run(Path(), *fsdp.PRUNED[case])
    for rank in two:
        run = rank["pruned"][case]
        for kind in ("removed", "params", "kinds"):
            assert run.get(kind) == alone.get(kind)
        for kind in ("weights", "state", "rolled back", "went on"):
            torch.testing.assert_close(run.get(kind), alone.get(kind), rtol=0, atol=1e-5)
        assert run["local"] < 0.6 * alone["local"], "every rank has its part alone"


def test_an_event_gathers_one_tensor_after_the_other(two: Any) -> None:
    for rank in two:
        # Of nine layers, with as much again twice in AdamW's state; gloo may still hold the one before.
        assert 1 <= rank["gathered"] <= 2.1


def test_an_event_that_fails_leaves_a_divided_network_as_it_was(two: Any) -> None:
    for rank in two:
        run = rank["undone"]
        assert "the ranks disagree on which channels of '2' go" in run["said"]
        assert run["scored"][-1] == ("2", 16, 17), "24 channels of the first layer were 17 by then"
        torch.testing.assert_close(run["after"], run["before"], rtol=0, atol=0)
        assert {name: len(units) for name, units in run["removed"].items()} == {"input": 3, "0": 7, "2": 4}


def test_a_step_is_one_message(two: Any) -> None:
    for rank in two:
        assert rank["messages"] == ["all_reduce"]


def test_a_checkpoint_of_a_divided_network_is_loaded_by_any_number(two: Any) -> None:
    for rank in two:
        run = rank["pruned"]["roll-back"]
        for kind in ("weights", "went on"):
            torch.testing.assert_close(run["loaded"][kind], run[kind], rtol=0, atol=0)
    folder = Path(two[0]["folder"])
    alone = fsdp.loaded_divided(folder, "RLS", scenarios.normed(), 1)
    torch.testing.assert_close(alone["weights"], run["weights"], rtol=0, atol=0)
    torch.testing.assert_close(alone["went on"], run["went on"], rtol=0, atol=1e-5)
    model = rlsprune.load(folder / "twice.safetensors", scenarios.normed())
    torch.testing.assert_close(dict(model.named_parameters()), run["weights"], rtol=0, atol=0)


def test_a_checkpoint_of_two_ranks_is_loaded_by_any_number(two: Any) -> None:
    for run in (*(rank["checkpoint"] for rank in two), fsdp.loaded_run(Path(two[0]["folder"]))):
        torch.testing.assert_close(run["loaded"], two[0]["checkpoint"]["saved"], rtol=0, atol=0)
        assert run["history"] == two[0]["checkpoint"]["history"] != []


def test_the_run_command_by_two_ranks_makes_the_run_of_one(two: Any, tmp_path: Path) -> None:
    assert main([*OPTIONS, "--epochs", "3", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert [rank["exit code"] for rank in two] == [0, 0]
    agree_runs(Path(two[0]["folder"]) / "run", tmp_path)


def test_a_rank_that_vanishes_is_missed(two: Any) -> None:
    assert "rank 0 of 2 lost the others while exchanging sums" in two[0]["lost"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_lost_rank_ends_the_others(tmp_path: Path, end: str) -> None:
    processes = launch.start(2, "distributed.scenarios:lose_a_rank", tmp_path, end, timeout=5)
    try:
        output, _ = processes[0].communicate(timeout=60)
        assert processes[0].returncode != 0
        assert "RankLostError: rank 0 of 2 lost the others while exchanging sums" in output
    except subprocess.TimeoutExpired:
        pytest.fail("rank 0 waits for ever")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_three_ranks_do_what_one_does(alone: Any, tmp_path: Path) -> None:
    for rank in launch.run(3, "distributed.scenarios:equal_runs", tmp_path):
        for case in scenarios.CASES:
            agree(rank["plain"][case], alone[case])
