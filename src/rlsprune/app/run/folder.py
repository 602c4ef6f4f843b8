"""The folder of a run: small JSON files, the model, and checkpoints to go on from.

Every file is written beside its place, flushed to the disk and renamed, so that a run that is killed at any moment
leaves a folder that can be read and resumed.
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
        """Reads `name`.json, of this version or an earlier one.

        Raises:
            FileError: It is missing or damaged.
        """
        return self._parse(f"{name}.json", self._read(f"{name}.json"))

    def read_summary(self) -> dict[str, Any]:
        """Reads summary.json, and sees that it says what every reader of it needs.

        Raises:
            FileError: It is missing or damaged.
        """
        summary = self.read_json("summary")
        for name, kinds in {**_IN_SUMMARY, metric_of(summary).name: (float, int)}.items():
            if type(summary.get(name)) not in kinds:
                problem = f"its {name} is {str(summary.get(name))[:40]!a}"
                raise FileError(
                    self.path / "summary.json", problem, "remove it and resume the run, which writes it anew"
                )
        return summary

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes `name`.jsonl, all of it: no line is ever doubled or cut."""
        self._write(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Reads `name`.jsonl, of this version or an earlier one.

        Raises:
            FileError: It is missing or damaged.
        """
        # Not splitlines(): it splits at more characters than those that end a line of JSON.
        return [self._parse(f"{name}.jsonl", line) for line in self._read(f"{name}.jsonl").split("\n") if line]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other process from running in this folder while the block runs.

        Raises:
            InUseError: One does so already; the message says which.
            StorageError: The folder cannot be written to.
            FileError: There is a symbolic link in it.
        """
        with contextlib.ExitStack() as held:
            with storing(self.path):
                make_folder(self.path)
                self.refuse_links()
                held.enter_context(exclusive(self.path / ".lock"))
                for path in self.path.iterdir():
                    if _HALF_WRITTEN.fullmatch(path.name):  # by a run that was killed
                        path.unlink()
            yield

    def save_checkpoint(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of an epoch and removes those that are no longer needed.

        Args:
            epoch: The number of epochs done.
            model: In the shape it has.
            state: Plain containers and tensors.

        Raises:
            StorageError: The disk did not take it; the checkpoints before are intact.
        """
        self._checkpoints.save(epoch, model, state)

    def load_checkpoint(self, into: nn.Module) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest sound checkpoint; damaged ones after it are set aside, with a warning.

        Args:
            into: A fresh, unpruned model; it takes the checkpoint's shape and weights.

        Returns:
            The number of epochs done and the state, or None if there is no checkpoint.

        Raises:
            FileError: There are checkpoints, and none is sound.
        """
        return self._checkpoints.load(into)

    def save_model(self, model: nn.Module, metadata: Mapping[str, Any]) -> None:
        """Writes the final model."""
        with storing(self.model):
            modelfile.save(model, self.model, metadata=metadata)

    def set_checkpoint_aside(self) -> None:
        """Renames the newest checkpoint, whose network is spoilt, so that the one before is used."""
        self._checkpoints.set_newest_aside()

    def drop_old_checkpoints(self) -> None:
        """Keeps only the newest: the run is over."""
        self._checkpoints.keep_newest()

    def refuse_links(self) -> None:
        """Refuses links: in a stranger's folder they could lead writes to any place.

        Raises:
            FileError: There is one.
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
            raise FileError(self.path / name, "it holds no JSON object", remedy)
        return in_todays_words(content)


class FollowedFolder(RunFolder):
    """A folder that another process of the same run writes: this one reads it and leaves all writing to that one."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The other process holds the lock."""
        yield

    def save_checkpoint(self, epoch: int, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Nothing."""

    def save_model(self, model: nn.Module, metadata: Mapping[str, Any]) -> None:
        """Nothing."""

    def drop_old_checkpoints(self) -> None:
        """Nothing."""

    def _write(self, name: str, text: str) -> None:
        """Nothing."""
