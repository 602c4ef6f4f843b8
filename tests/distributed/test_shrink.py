"""``shrink`` by several processes, each with its share of the batches, does what one does with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rlsprune
from distributed import launch, shrinks
from zoo import ZOO


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return shrinks.all_cases(Path())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch.run(2, "distributed.shrinks:all_cases", tmp_path_factory.mktemp("two"))


def agree(run: dict[str, Any], alone: dict[str, Any]) -> None:
    assert run["front"] == alone["front"]
    torch.testing.assert_close(run["state"], alone["state"], rtol=1e-5, atol=2e-6)
    for mine, theirs in zip(run["scores"], alone["scores"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("case", shrinks.CASES)
def test_two_ranks_make_the_network_of_one(alone: Any, two: Any, case: str) -> None:
    assert alone[case]["front"][-1][0] < alone[case]["front"][0][0]
    for rank in two:
        agree(rank[case], alone[case])


@pytest.mark.parametrize("case", [*shrinks.CASES, "by time"])
def test_all_ranks_have_the_same_network_to_the_bit(two: Any, case: str) -> None:
    first, second = (rank[case] for rank in two)
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    assert first["scores"] == second["scores"]


def test_ranks_that_do_not_fit_together_are_told_so(two: Any) -> None:
    for rank in two:
        assert "the ranks disagree on the parameter '1.weight'" in rank["refusals"]["weights"]
        assert "batches has no batch on some rank" in rank["refusals"]["no batch"]
        assert rank["refusals"]["apart"] == "True"


@pytest.mark.slow
def test_three_ranks_make_the_network_of_one(alone: Any, tmp_path: Path) -> None:
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
