"""A run's checkpoints: the last two, with checksums; a damaged one is set aside and the one before is used."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError, flush, make_folder, storing
from rlsprune.io.state import load_state, save_state

__all__ = ["Checkpoints"]

_KEPT = 2  # the newest, and one more in case the newest is lost
_NAME = re.compile(r"epoch-(\d{6,12})")
_MODEL, _STATE = "model.safetensors", "state.safetensors"
_PARTS = "checkpoint"  # key of the state for its epoch and its model


class Checkpoints:
    """The checkpoints in a folder.

    A checkpoint is a folder that is written under another name, flushed to the disk and renamed when it is complete, so
    that a folder with a checkpoint's name is whole. Checkpoints are ordered by epoch, not by time. The state, written
    last, names its epoch and its model; a folder under another name, or with a part of another checkpoint, counts as
    damaged.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Writes the checkpoint of an epoch and removes those that are no longer needed.

        Args:
            epoch: The number of epochs done.
            model: The model in its present shape.
            state: Plain containers and tensors.

        Raises:
            StorageError: It could not be written; earlier checkpoints are intact.
        """
        final, temporary = self.path / f"epoch-{epoch:06d}", self.path / ".writing"
        with storing(final):
            make_folder(self.path)
            self._remove(temporary)
            try:
                make_folder(temporary)
                modelfile.save(model, temporary / _MODEL)
                parts = {"epoch": epoch, "model": modelfile.read_checksum(temporary / _MODEL)}
                save_state(temporary / _STATE, {_PARTS: parts, **state})
                self._remove(final)
                temporary.rename(final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint is useless and may fill the disk
                raise
            flush(self.path)
            self._remove_all_but(_KEPT)

    def load(self, into: nn.Module) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest checkpoint that is sound.

        Newer ones are renamed, with a warning that says what is wrong with them.

        Args:
            into: A fresh, unpruned model; it takes the checkpoint's shape and weights.

        Returns:
            The number of epochs done and the state, or None if there is no checkpoint.

        Raises:
            FileError: There are checkpoints, but none is sound. Nothing has been renamed.
        """
        damaged: list[tuple[Path, Exception]] = []
        for epoch, path in reversed(self._found()):
            try:
                state = load_state(path / _STATE)
                _check_parts(path, epoch, state.pop(_PARTS, None))
                modelfile.load(path / _MODEL, into)
            except (FileError, OSError) as error:
                damaged.append((path, error))
                continue
            for bad, reason in damaged:
                aside = self._set_aside(bad, "damaged")
                warnings.warn(
                    f"the checkpoint {bad} is damaged ({reason}): it was set aside as {aside.name}, and the run "
                    f"resumes from {path.name}",
                    stacklevel=4,
                )
            return epoch, state
        if damaged:
            path, reason = damaged[0]
            remedy = f"delete the folder {self.path} to start the run again from the beginning"
            raise FileError(path, f"the checkpoint cannot be used ({reason}), and no earlier one is sound", remedy)
        return None

    def examine(self) -> list[tuple[Path, int, str | None]]:
        """Reads every checkpoint completely, the oldest first, and changes nothing.

        Returns:
            Its folder, its epoch, and the problem with it, or None.
        """
        found: list[tuple[Path, int, str | None]] = []
        for epoch, path in self._found():
            wrong = None
            try:
                _check_parts(path, epoch, load_state(path / _STATE).get(_PARTS))
                modelfile.verify(path / _MODEL)
            except (FileError, OSError) as error:
                wrong = str(error)
            found.append((path, epoch, wrong))
        return found

    def keep_newest(self) -> None:
        """Removes all checkpoints but the newest."""
        with storing(self.path):
            self._remove_all_but(1)

    def set_newest_aside(self) -> None:
        """Renames the newest checkpoint, whose network is unusable, so that the one before is used."""
        for _, path in self._found()[-1:]:
            self._set_aside(path, "spoilt")

    def _found(self) -> list[tuple[int, Path]]:
        names = (path.name for path in self.path.iterdir()) if self.path.is_dir() else ()
        return sorted((int(match[1]), self.path / match[0]) for name in names if (match := _NAME.fullmatch(name)))

    def _set_aside(self, path: Path, prefix: str) -> Path:
        """Gives a checkpoint another name, under which it does not count."""
        taken = {other.name for other in self.path.iterdir()}
        names = (f"{prefix}-{path.name}" + (f"-{number}" if number else "") for number in range(len(taken) + 1))
        aside = self.path / next(name for name in names if name not in taken)
        with storing(path):
            path.rename(aside)
            flush(self.path)
        return aside

    def _remove_all_but(self, kept: int) -> None:
        for _, old in self._found()[:-kept]:
            self._remove(old)

    def _remove(self, path: Path) -> None:
        """Removes a folder after a change of its name, so that half a checkpoint never counts as one."""
        doomed = self.path / ".removing"
        for stage in (doomed, path):
            if stage.exists():
                stage.rename(doomed)
                _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _check_parts(path: Path, epoch: int, parts: Any) -> None:
    """Raises FileError unless the state belongs to that epoch and to the model beside it; 0.1.0 did not record this."""
    if parts is None:
        return
    remedy = "restore the folder as it was written"
    if not isinstance(parts, dict) or parts.get("epoch") != epoch:
        written = parts.get("epoch") if isinstance(parts, dict) else parts
        raise FileError(path, f"its state belongs to epoch {written!r}, not to the one in its name", remedy)
    if parts.get("model") != modelfile.read_checksum(path / _MODEL):
        raise FileError(path, "its model is not the one that its state was written with", remedy)
