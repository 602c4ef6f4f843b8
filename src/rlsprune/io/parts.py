"""The tensors of a checkpoint: every rank writes its part, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlsprune.distributed.ranks import Ranks
from rlsprune.io.atomic import FileError, file_digest, flush
from rlsprune.model.interrupts import uninterrupted

__all__ = ["joined", "read_parts", "taken_apart", "write_parts"]

_PART = "\0part"  # key of the name that replaces a tensor


def taken_apart(value: Any, name: str, parts: dict[str, Tensor]) -> Any:
    """Returns nested containers without their tensors, and puts these into ``parts``, under names from ``name`` on.

    Tensors without dimensions stay: they are counts, the same on all ranks.
    """
    if isinstance(value, Tensor) and value.dim():
        parts[name] = value.detach()
        return {_PART: name}
    if isinstance(value, Mapping):
        return {key: taken_apart(item, f"{name}/{key}", parts) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(taken_apart(item, f"{name}/{i}", parts) for i, item in enumerate(value))
    return value


def joined(value: Any, parts: Mapping[str, Tensor]) -> Any:
    """Reverses `taken_apart`: returns the containers with their tensors."""
    if isinstance(value, dict):
        return parts[value[_PART]] if _PART in value else {key: joined(item, parts) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(joined(item, parts) for item in value)
    return value


def write_parts(folder: Path, parts: Mapping[str, Tensor], ranks: Ranks | None) -> dict[str, str]:
    """Writes the parts and flushes them to the disk; all ranks call it.

    Returns:
        Name of a file → its SHA-256.
    """
    with _explained(folder):
        save(dict(parts), checkpoint_id=folder, no_dist=ranks is None)
    rank = 0 if ranks is None else ranks.rank
    own = {}
    for path in folder.iterdir():
        if path.name.startswith(f"__{rank}_") or (rank == 0 and not path.name.startswith("__")):
            flush(path)
            own[path.name] = file_digest(path)
    flush(folder)
    return own if ranks is None else {name: d for digests in ranks.gather(own) for name, d in digests.items()}


def read_parts(
    folder: Path, digests: Mapping[str, str], room: Callable[[str, TensorStorageMetadata], Tensor], ranks: Ranks | None
) -> dict[str, Tensor]:
    """Reads parts that any number of ranks has written; all ranks call it.

    Args:
        folder: The folder of `write_parts`.
        digests: The result of `write_parts`.
        room: A function that returns the tensor to load into, given a name and the metadata of the saved tensor.
        ranks: The processes.

    Raises:
        FileError: A file is missing or damaged.
    """
    names = sorted(digests)
    mine = names if ranks is None else names[ranks.rank :: ranks.size]
    wrong = [name for name in mine if not (folder / name).is_file() or file_digest(folder / name) != digests[name]]
    if ranks is not None:
        wrong = [name for found in ranks.gather(wrong) for name in found]
    if wrong:
        raise FileError(folder / wrong[0], "it differs from what was written", "load an earlier checkpoint")
    outlines = FileSystemReader(folder).read_metadata().state_dict_metadata
    parts = {name: room(name, kept) for name, kept in outlines.items() if isinstance(kept, TensorStorageMetadata)}
    with _explained(folder):
        load(parts, checkpoint_id=folder, no_dist=ranks is None)
    return parts


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Delays Ctrl-C inside, which torch would take for a failure. Raises the cause of a failure."""
    with uninterrupted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # on purpose
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            denied = next((cause for cause in causes if isinstance(cause, OSError)), None)
            if denied is not None:
                raise denied from error
            problem = f"its parts cannot be read or written ({causes[0] if causes else error})"
            raise FileError(folder, problem, "use a checkpoint of this model") from error
