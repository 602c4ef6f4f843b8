"""The folder of a run: small JSON files, the model, and checkpoints to resume from.

Every file is written under a temporary name, flushed to the disk and renamed, so that a run that is killed at any
moment leaves a folder that can be read and resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rlsprune.app.config.metrics import metric_of
from rlsprune.app.run.checkpoints import Checkpoints
from rlsprune.app.run.earlier import in_todays_words
from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError, make_folder, read_text, replacing, storing
from rlsprune.io.lock import exclusive
from rlsprune.model.interrupts import uninterrupted

__all__ = ["FollowedFolder", "RunFolder"]

_HALF_WRITTEN = re.compile(
    r"\.(config|environment|metrics|events|faults|summary|model)\.[0-9a-f]{12}\.(jsonl?|safetensors)"
)

_IN_SUMMARY: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("experiment", "method"), (str,)),
    **dict.fromkeys(("loss", "nodes_percent", "weights_percent", "flops_percent", "seconds"), (float, int)),
    "seed": (int,),
}


class RunFolder:
    """A run's files.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._checkpoints = Checkpoints(self.path / "checkpoint")

    @property
    def model(self) -> Path:
        """Returns the path of the final model."""
        return self.path / "model.safetensors"

    @property
    def finished(self) -> bool:
        """Returns whether the run is over; the summary is written last."""
        return (self.path / "summary.json").is_file()

    @property
    def started(self) -> bool:
        """Returns whether there is a run in the folder."""
        return (self.path / "config.json").is_file()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes `name`.json."""
        self._write(f"{name}.json", json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads `name`.json, of this version or an earlier one.

        Raises:
            FileError: The file is missing or damaged.
        """
        return self._parse(f"{name}.json", self._read(f"{name}.json"))

    def read_summary(self) -> dict[str, Any]:
        """Reads summary.json, and checks the entries that every reader needs.

        Raises:
            FileError: The file is missing or damaged.
        """
        summary = self.read_json("summary")
        for name, kinds in {**_IN_SUMMARY, metric_of(summary).name: (float, int)}.items():
            if type(summary.get(name)) not in kinds:
                problem = f"its {name} is {str(summary.get(name))[:40]!a}"
                raise FileError(
                    self.path / "summary.json", problem, "remove it and resume the run, which writes it again"
                )
        return summary

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes `name`.jsonl as a whole, so that no line is ever doubled or cut."""
        self._write(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Reads `name`.jsonl, of this version or an earlier one.

        Raises:
            FileError: The file is missing or damaged.
        """
        # Not splitlines(), which also splits at characters that do not end a line of JSON.
        return [self._parse(f"{name}.jsonl", line) for line in self._read(f"{name}.jsonl").split("\n") if line]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other process from running in this folder while the block runs.

        Raises:
            InUseError: Another process already runs in it; the message says which.
            StorageError: The folder cannot be written to.
            FileError: There is a symbolic link in it.
        """
        with contextlib.ExitStack() as held:
            with storing(self.path):
                make_folder(self.path)
                self.refuse_links()
                held.enter_context(exclusive(self.path / ".lock"))
                for path in self.path.iterdir():
                    if _HALF_WRITTEN.fullmatch(path.name):  # left by a run that was killed
                        path.unlink()
            yield

    def save_checkpoint(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of an epoch and removes those that are no longer needed.

        Args:
            epoch: The number of epochs done.
            model: The model in its present shape.
            state: Plain containers and tensors.

        Raises:
            StorageError: It could not be written; earlier checkpoints are intact.
        """
        self._checkpoints.save(epoch, model, state)

    def load_checkpoint(self, into: nn.Module) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest sound checkpoint, and sets damaged newer ones aside with a warning.

        Args:
            into: A fresh, unpruned model; it takes the checkpoint's shape and weights.

        Returns:
            The number of epochs done and the state, or None if there is no checkpoint.

        Raises:
            FileError: There are checkpoints, but none is sound.
        """
        return self._checkpoints.load(into)

    def save_model(self, model: nn.Module, metadata: Mapping[str, Any]) -> None:
        """Writes the final model."""
        with storing(self.model):
            modelfile.save(model, self.model, metadata=metadata)

    def set_checkpoint_aside(self) -> None:
        """Renames the newest checkpoint, whose network is unusable, so that the one before is used."""
        self._checkpoints.set_newest_aside()

    def drop_old_checkpoints(self) -> None:
        """Removes all checkpoints but the newest, after the run is over."""
        self._checkpoints.keep_newest()

    def refuse_links(self) -> None:
        """Refuses symbolic links, which in a foreign folder could redirect writes to any place.

        Raises:
            FileError: There is a symbolic link in the folder.
        """
        for parent, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                if (Path(parent) / name).is_symlink():
                    problem = "it is a symbolic link, and what a run writes must stay in its folder"
                    raise FileError(Path(parent) / name, problem, "remove it, or put the file itself there")

    def _write(self, name: str, text: str) -> None:
        with storing(self.path / name):
            make_folder(self.path)
            with uninterrupted(), replacing(self.path / name) as path:
                path.write_text(text, encoding="utf-8")

    def _read(self, name: str) -> str:
        return read_text(self.path / name, "give the folder of a run, as `rlsprune run` makes it")

    def _parse(self, name: str, text: str) -> dict[str, Any]:
        remedy = "restore it, or start the run again"
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileError(self.path / name, f"it is not JSON ({error})", remedy) from error
        if not isinstance(content, dict):
            raise FileError(self.path / name, "it is not a JSON object", remedy)
        return in_todays_words(content)


class FollowedFolder(RunFolder):
    """A folder that another process of the same run writes; this process only reads it."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Takes no lock, because the other process holds it."""
        yield

    def save_checkpoint(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Does nothing."""

    def save_model(self, model: nn.Module, metadata: Mapping[str, Any]) -> None:
        """Does nothing."""

    def drop_old_checkpoints(self) -> None:
        """Does nothing."""

    def _write(self, name: str, text: str) -> None:
        """Does nothing."""
