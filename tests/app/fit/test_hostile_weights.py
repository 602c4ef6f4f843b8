"""Weights from strangers: a .pt file can neither run code nor take memory for what it merely claims."""

from __future__ import annotations

import json
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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
    refuse(path, "something other than tensors")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000_000))
    refuse(path, "packed or overlap")


def test_a_header_of_a_million_names_is_refused_at_once(tmp_path: Path) -> None:
    entries = ",".join(
        f'"{number:040}" : {{ "dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(600_000)
    )
    header = f"{{{entries}}}".encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(path, "lists more than 100,000 tensors")  # reading them would take a gigabyte
    path.write_bytes((2**27).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(2**28)
    refuse(path, "has a header of 134,217,728 bytes")


def test_files_with_holes_are_not_read(tmp_path: Path) -> None:
    claims = {"weight": {"dtype": "F32", "shape": [2, 2**37], "data_offsets": [0, 2**40]}}
    header = json.dumps(claims | {"bias": {"dtype": "F32", "shape": [2], "data_offsets": [2**40, 2**40 + 8]}}).encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + 2**40 + 8)  # a terabyte that takes no room on the disk
    refuse(path, "'weight' is .* in it|cannot be mapped into memory")


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 3, dtype=torch.complex64), torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3).int()]
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_other_kinds_of_numbers_are_not_cast(tmp_path: Path, weight: torch.Tensor, suffix: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    (torch.save if suffix == "pt" else save_file)({"weight": weight, "bias": torch.zeros(2)}, path)
    refuse(path, "'weight' is .* in it and torch.float32 in the model")
    (torch.save if suffix == "pt" else save_file)({"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2)}, path)
    load_weights(model := nn.Linear(3, 2), path)
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    for weight in (torch.eye(3)[:2].to_sparse(), torch.eye(3)[:2].to_sparse_csr()):
        torch.save({"weight": weight, "bias": torch.zeros(2)}, tmp_path / "weights.pt")
        refuse(tmp_path / "weights.pt", "sparse|without executing it")
