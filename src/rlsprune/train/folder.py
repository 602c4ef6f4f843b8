"""The folder of a run: small JSON files, the model, and checkpoints to go on from.

Every file is written beside its place, flushed to the disk and renamed, so that a run that is killed at any moment
leaves a folder that can be read and resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsprune import io
from rlsprune.files import FileError, replacing

__all__ = ["RunFolder"]

_KEPT = 2  # checkpoints: the newest, and one more in case the disk loses it
_NAME = re.compile(r"epoch-(\d{6})")


class RunFolder:
    """A run's files.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end: the summary is written last."""
        return (self.path / "summary.json").is_file()

    @property
    def started(self) -> bool:
        """Whether there is a run in the folder."""
        return (self.path / "config.json").is_file()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes `name`.json."""
        self._write(f"{name}.json", json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads `name`.json.

        Raises:
            FileError: It is missing or damaged.
        """
        content = self._parse(f"{name}.json", self._read(f"{name}.json"))
        if not isinstance(content, dict):
            raise FileError(self.path / f"{name}.json", "it holds no JSON object", "start the run again")
        return content

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes `name`.jsonl, all of it: no line is ever doubled or cut."""
        self._write(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Reads `name`.jsonl.

        Raises:
            FileError: It is missing or damaged.
        """
        return [self._parse(f"{name}.jsonl", line) for line in self._read(f"{name}.jsonl").splitlines()]

    def save_checkpoint(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of an epoch and removes those that are no longer needed.

        Args:
            epoch: The number of epochs done.
            model: In the shape it has.
            state: Plain containers and tensors.
        """
        parent = self.path / "checkpoint"
        parent.mkdir(parents=True, exist_ok=True)
        final, temporary = parent / f"epoch-{epoch:06d}", parent / ".writing"
        for leftover in (temporary, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.mkdir()
        io.save(model, temporary / "model.safetensors")
        with replacing(temporary / "state.pt") as path:
            torch.save(dict(state), path)
        temporary.rename(final)
        _flush_folder(parent)
        for _, old in self._checkpoints()[:-_KEPT]:
            shutil.rmtree(old)

    def load_checkpoint(self, into: nn.Module) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest checkpoint.

        Args:
            into: A fresh, unpruned model; it takes the checkpoint's shape and weights.

        Returns:
            The number of epochs done and the state, or None if there is no checkpoint.

        Raises:
            FileError: The checkpoint is damaged.
        """
        checkpoints = self._checkpoints()
        if not checkpoints:
            return None
        epoch, newest = checkpoints[-1]
        io.load(newest / "model.safetensors", into)
        try:
            state = torch.load(newest / "state.pt", map_location="cpu", weights_only=True)
        except Exception as error:
            remedy = f"delete the folder {newest} to go on from an earlier epoch"
            raise FileError(newest / "state.pt", f"it cannot be read ({error})", remedy) from error
        return epoch, state

    def drop_old_checkpoints(self) -> None:
        """Keeps only the newest: the run is over."""
        for _, old in self._checkpoints()[:-1]:
            shutil.rmtree(old)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        parent = self.path / "checkpoint"
        found = sorted(parent.iterdir()) if parent.is_dir() else []
        return [(int(match[1]), path) for path in found if (match := _NAME.fullmatch(path.name))]

    def _write(self, name: str, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.path / name) as path:
            path.write_text(text, encoding="utf-8")

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give the folder of a run, as `rlsprune run` makes it"
            raise FileError(self.path / name, f"it cannot be read ({error})", remedy) from error

    def _parse(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            remedy = "restore it, or start the run again"
            raise FileError(self.path / name, f"it is not JSON ({error})", remedy) from error


def _flush_folder(path: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
