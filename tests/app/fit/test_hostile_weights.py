"""Weights from strangers: a .pt file can neither run code nor take memory for what it merely claims."""

from __future__ import annotations

import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlsprune.app.fit.model import load_weights
from rlsprune.io.atomic import FileError


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


def refuse(path: Path, said: str) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match=said):
        load_weights(model, path)
    assert torch.equal(model.weight, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # KiB


def test_sound_weights_are_taken(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    for content in (source.state_dict(), {"state_dict": source.state_dict(), "epoch": 3}):
        torch.save(content, tmp_path / "weights.pt")
        load_weights(model, tmp_path / "weights.pt")
        assert torch.equal(model.weight, source.weight)


def test_claims_of_terabytes_are_refused(tmp_path: Path) -> None:
    bias = torch.zeros(2)
    for weight in (torch.zeros(1).expand(10**6, 10**6), torch.zeros(1).as_strided((2, 10**12), (0, 0))):
        torch.save({"weight": weight, "bias": bias}, tmp_path / "weights.pt")
        refuse(tmp_path / "weights.pt", "'weight' is .* in it")


def test_code_bombs_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": Evil()}, path)
    refuse(path, "without executing it")
    path.write_bytes(pickle.dumps(Evil()))
    refuse(path, "without executing it")
    torch.save({"weight": torch.zeros(2, 3), 7: torch.zeros(2)}, path)
    refuse(path, "names that are not text")
    torch.save([torch.zeros(2, 3)], path)
    refuse(path, "something else than tensors")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000_000))
    refuse(path, "packed or overlap")
