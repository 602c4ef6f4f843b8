"""Checkpoints: the last two are kept, and a damaged one costs an epoch, not the run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rlsprune.app.run.checkpoints import Checkpoints
from rlsprune.io.atomic import FileError, StorageError


def model(value: float) -> nn.Linear:
    made = nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def saved(path: Path, epochs: int) -> Checkpoints:
    checkpoints = Checkpoints(path)
    for epoch in range(1, epochs + 1):
        checkpoints.save(epoch, model(epoch), {"tensor": torch.tensor([epoch]), "list": [1.5, None, "x"]})
    return checkpoints


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_last_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3)
    assert names(tmp_path) == ["epoch-000002", "epoch-000003"]
    fresh = nn.Linear(3, 2)
    loaded = checkpoints.load(into=fresh)
    assert loaded is not None
    assert loaded[0] == 3
    assert loaded[1]["tensor"].item() == 3
    assert loaded[1]["list"] == [1.5, None, "x"]
    assert torch.equal(fresh.weight, model(3).weight)
    checkpoints.keep_newest()
    assert names(tmp_path) == ["epoch-000003"]


def test_one_that_was_being_written_or_removed_does_not_count(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    for half in (".writing", ".removing"):
        (tmp_path / half).mkdir()
        (tmp_path / half / "model.safetensors").write_bytes(b"half")
    loaded = checkpoints.load(into=nn.Linear(3, 2))
    assert loaded is not None
    assert loaded[0] == 1
    checkpoints.save(2, model(2), {})
    assert names(tmp_path) == ["epoch-000001", "epoch-000002"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load(into=nn.Linear(3, 2)) is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the model": lambda folder: flip(folder / "model.safetensors"),
    "a flipped bit in the state": lambda folder: flip(folder / "state.safetensors"),
    "an empty model": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "an empty state": lambda folder: (folder / "state.safetensors").write_bytes(b""),
    "a cut state": lambda folder: (folder / "state.safetensors").write_bytes(
        (folder / "state.safetensors").read_bytes()[:-1]
    ),
    "no state": lambda folder: (folder / "state.safetensors").unlink(),
    "no model": lambda folder: (folder / "model.safetensors").unlink(),
    "the model as state": lambda folder: shutil.copy(folder / "model.safetensors", folder / "state.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_named_and_set_aside_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    checkpoints = saved(tmp_path, 3)
    newest = tmp_path / "epoch-000003"
    DAMAGE[damage](newest)
    fresh = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match=r"epoch-000003 is damaged .* set aside as damaged-epoch-000003") as caught:
        loaded = checkpoints.load(into=fresh)
    assert str(newest) in str(caught[0].message)
    assert loaded is not None
    assert loaded[0] == loaded[1]["tensor"].item() == 2
    assert torch.equal(fresh.weight, model(2).weight)
    assert names(tmp_path) == ["damaged-epoch-000003", "epoch-000002"]
    # The run goes on, reaches that epoch again, and it may be damaged again.
    checkpoints.save(3, model(3), {})
    DAMAGE[damage](newest)
    with pytest.warns(UserWarning, match="set aside as damaged-epoch-000003-1"):
        assert checkpoints.load(into=nn.Linear(3, 2)) is not None


def test_without_a_sound_one_nothing_is_renamed_and_the_remedy_is_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    for epoch in (1, 2):
        flip(tmp_path / f"epoch-00000{epoch}" / "state.safetensors")
    with pytest.raises(FileError, match=r"epoch-000002: .*no earlier one is sound; delete the folder"):
        checkpoints.load(into=nn.Linear(3, 2))
    assert names(tmp_path) == ["epoch-000001", "epoch-000002"]


def test_order_is_that_of_the_epochs_even_beyond_the_width_of_their_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch in (999_999, 1_000_000):
        checkpoints.save(epoch, model(epoch), {})
    loaded = checkpoints.load(into=nn.Linear(3, 2))
    assert loaded is not None
    assert loaded[0] == 1_000_000


def test_state_that_cannot_be_kept_leaves_the_old_checkpoints_alone(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    with pytest.raises(ValueError, match=r"state\['optimizer'\]\[0\] is object"):
        checkpoints.save(3, model(3), {"optimizer": [object()]})
    assert names(tmp_path) == ["epoch-000001", "epoch-000002"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=r"file/checkpoint/epoch-000001 cannot be written .*check the disk"):
        Checkpoints(tmp_path / "file" / "checkpoint").save(1, model(1), {})


def other_model(path: Path) -> None:
    shutil.copy(path / "epoch-000002" / "model.safetensors", path / "epoch-000003" / "model.safetensors")


def other_state(path: Path) -> None:
    shutil.copy(path / "epoch-000002" / "state.safetensors", path / "epoch-000003" / "state.safetensors")


def swapped_states(path: Path) -> None:
    states = [path / f"epoch-00000{epoch}" / "state.safetensors" for epoch in (2, 3)]
    contents = [state.read_bytes() for state in states]
    for state, content in zip(states, reversed(contents), strict=True):
        state.write_bytes(content)


@pytest.mark.parametrize(("mix", "said"), [(other_model, "model is not the one"), (other_state, "belongs to epoch 2")])
def test_parts_of_two_checkpoints_are_not_taken_for_one(tmp_path: Path, mix: Callable[[Path], None], said: str) -> None:
    """Each of the two files is whole and has its checksum."""
    checkpoints = saved(tmp_path, 3)
    mix(tmp_path)
    fresh = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match=said):
        epoch, state = checkpoints.load(into=fresh)
    assert (epoch, state["tensor"].item(), fresh.weight[0, 0].item()) == (2, 2, 2.0)
    assert "damaged-epoch-000003" in names(tmp_path)


def test_swapped_states_leave_no_sound_checkpoint(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3)
    swapped_states(tmp_path)
    fresh = model(7)
    with pytest.raises(FileError, match=r"its state belongs to epoch 2.*no earlier one is sound"):
        checkpoints.load(into=fresh)
    assert torch.equal(fresh.weight, model(7).weight)


@pytest.mark.parametrize("name", ["epoch-000004", "epoch-999999"])
def test_a_checkpoint_under_another_name_proves_nothing(tmp_path: Path, name: str) -> None:
    checkpoints = saved(tmp_path, 3)
    shutil.copytree(tmp_path / "epoch-000003", tmp_path / name)
    with pytest.warns(UserWarning, match="belongs to epoch 3, not to the one in its name"):
        epoch, state = checkpoints.load(into=nn.Linear(3, 2))
    assert (epoch, state["tensor"].item()) == (3, 3)
    assert "checkpoint" not in state


@pytest.mark.parametrize("stray", ["file", "folder"])
def test_a_stray_removing_is_in_nobodys_way(tmp_path: Path, stray: str) -> None:
    checkpoints = saved(tmp_path, 2)
    if stray == "file":
        (tmp_path / ".removing").write_text("x")
    else:
        (tmp_path / ".removing" / "deep").mkdir(parents=True)
    checkpoints.save(3, model(3), {})
    assert names(tmp_path) == ["epoch-000002", "epoch-000003"]
