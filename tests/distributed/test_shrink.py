"""``shrink`` by several processes, each with its share of the batches, does what one does with all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import rlsprune
from distributed import launch, shrinks
from distributed.test_kills import task
from distributed.test_run import run
from rlsprune.app.cli.main import main
from zoo import ZOO

__all__ = ["task"]  # a fixture


def agree(run: dict[str, Any], alone: dict[str, Any]) -> None:
    assert run["front"] == alone["front"]
    for mine, theirs in zip(tree_leaves(run["outputs"]), tree_leaves(alone["outputs"]), strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())
    # Less exact where inputs hardly vary: there many weights give the same outputs.
    torch.testing.assert_close(run["state"], alone["state"], rtol=1e-4, atol=5e-5)
    for mine, theirs in zip(run["scores"], alone["scores"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_two_ranks_make_the_network_of_one(tmp_path: Path) -> None:
    # One test: what several share would be computed by every worker that runs the tests.
    alone = shrinks.all_cases(tmp_path)
    first, second = launch.run(2, "distributed.shrinks:all_cases", tmp_path)
    for case in shrinks.CASES:
        assert alone[case]["front"][-1][0] < alone[case]["front"][0][0], case
        agree(first[case], alone[case])
    for case in [*shrinks.CASES, "by time"]:
        torch.testing.assert_close(first[case], second[case], rtol=0, atol=0)
    for rank in (first, second):
        assert "the ranks disagree on the parameter '1.weight'" in rank["refusals"]["weights"]
        assert "batches has no batch on some rank" in rank["refusals"]["no batch"]
        assert rank["refusals"]["apart"] == "True"
        sums_up_each_layer_once(rank["messages"])


def sums_up_each_layer_once(sent: list[tuple[str, list[str]]]) -> None:
    """However many dampings are tried and however often a layer in front of a ReLU is solved."""
    looks = [own for stage, own in sent if stage.startswith("choosing: ")]
    assert len(looks) > 5
    assert all(own == ["all_reduce"] for own in looks[:-1])
    assert looks[-1].count("all_reduce") == 1, "all curves are gathered after the last layer"
    refits = [own for stage, own in sent if stage.startswith("refitting: ")]
    assert len(refits) > 5
    # Counts and drift; rows; solution and error. A layer that has not drifted needs no more than the first.
    for own in refits:
        assert own in (["all_gather"], [*2 * ["all_gather"], "all_reduce"])
    assert sum(len(own) > 1 for own in refits) > 3


@pytest.mark.slow
def test_the_pareto_command_by_two_ranks_makes_the_front_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    first, second = launch.run(2, "distributed.shrinks:commands", folder)
    assert first["codes"] == second["codes"] == [0, 0]
    assert "Chosen:" in first["said"]
    assert second["said"] == "", "one speaks for all"
    assert main(shrinks.pareto(folder / "run", tmp_path / "front")) == 0
    fronts = [json.loads((out / "pareto.json").read_text()) for out in (folder / "front", tmp_path / "front")]
    assert fronts[0]["finished"]
    sizes = [[(point["params"], point["epochs"]) for point in front["front"]] for front in fronts]
    assert sizes[0] == sizes[1]
    assert sizes[0][-1][0] <= 0.3 * sizes[0][0][0]
    for mine, theirs in zip(*(front["front"] for front in fronts), strict=True):
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1.0)  # two of the 200 test images
    networks = [load_file(out / "model.safetensors") for out in (folder / "front", tmp_path / "front")]
    for name, weights in networks[0].items():
        torch.testing.assert_close(weights, networks[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_torchrun_fits_within_a_drop_and_draws_a_front(task: Path, tmp_path: Path) -> None:
    summaries, fronts = [], []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        options = ["--max-drop", "4", "--epochs", "6", "--batch-size", "60", "--quiet", "--out", str(out)]
        run(ranks, "fit", f"{task}/nets.py:without", "--data", f"{task}/table.npz", *options)
        run(ranks, "pareto", str(out), "--target", "0.5", "--recovery-epochs", "0", "--quiet")
        summaries.append(json.loads((out / "summary.json").read_text()))
        fronts.append(json.loads((out / "pareto" / "pareto.json").read_text())["front"])
        assert (out / "report.html").exists()
    one, two = summaries
    assert two["weights_percent"] == one["weights_percent"] < 90
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=1.0)
    assert [point["params"] for point in fronts[0]] == [point["params"] for point in fronts[1]]


@pytest.mark.slow
def test_three_ranks_make_the_network_of_one(tmp_path: Path) -> None:
    alone = shrinks.all_cases(tmp_path)
    for rank in launch.run(3, "distributed.shrinks:all_cases", tmp_path):
        for case in shrinks.CASES:
            agree(rank[case], alone[case])


def test_a_divided_network_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = ZOO["fnn"].model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"'1.weight' is divided over the ranks.*before fully_shard"):
            rlsprune.shrink(model, [torch.randn(8, 16)], target={"params": 0.5})
    finally:
        dist.destroy_process_group()
