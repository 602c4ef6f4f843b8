"""The machine stops before any operation on a file; the run is resumed and ends with the same numbers, bit for bit."""

import warnings
from pathlib import Path

import pytest

from app.run.tiny import leftovers, numbers, tiny_recipe
from disk import LOSSES, Disk, PowerLossError
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder

STRIDE = 23  # every so many operations in the default suite; all of them in the slow one


pytestmark = pytest.mark.usefixtures("quick_runs")


def interrupted(path: Path, stop_before: int | None) -> Disk:
    (path / "runs").mkdir(parents=True)
    disk = Disk(path / "runs", stop_before)
    try:
        with disk.running():
            train_and_prune(tiny_recipe(), RunFolder(path / "runs" / "run"))
    except PowerLossError:
        assert stop_before is not None
    return disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, object]:
    path = tmp_path_factory.mktemp("whole")
    disk = interrupted(path, None)
    disk.close()
    assert {"open", "write_text", "save_file", "fsync", "rename", "replace", "unlink"} <= set(disk.operations)
    result = numbers(RunFolder(path / "runs" / "run"))
    assert result[1], "nothing was pruned, so too little was tested"
    return len(disk.operations), result


def stop_everywhere(path: Path, whole: tuple[int, object], first: int, stride: int) -> int:
    operations, expected = whole
    tried = 0
    for number in range(first, operations, stride):
        disk = interrupted(path / str(number), number)
        for lost in LOSSES:
            folder = RunFolder(disk.restart(path / str(number) / lost, lost) / "run")
            seen = folder.read_lines("metrics") if (folder.path / "metrics.jsonl").exists() else []
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # nothing may be found damaged
                train_and_prune(tiny_recipe(), folder)
            assert numbers(folder) == expected, (number, disk.operations[-3:], lost)
            assert leftovers(folder.path) == []
            assert [line["epoch"] for line in seen] == list(range(1, len(seen) + 1)), "a reader saw half a file"
            tried += 1
        disk.close()
    return tried


def test_power_fails_before_some_operations(tmp_path: Path, whole: tuple[int, object]) -> None:
    assert stop_everywhere(tmp_path, whole, 0, STRIDE) >= 3 * (whole[0] // STRIDE)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("first", range(4))
def test_power_fails_before_every_operation(tmp_path: Path, whole: tuple[int, object], first: int) -> None:
    assert stop_everywhere(tmp_path, whole, first, 4) >= 3 * (whole[0] // 4)
