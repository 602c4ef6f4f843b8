"""Everything that loads a file: a sound file to damage, ways to damage it, and the errors that may come of it."""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import rlsprune
from app.data.writers import (
    cifar_bytes,
    idx_bytes,
    mat_bytes,
    random_images,
    random_labels,
    svhn_variables,
    tar_gz_bytes,
)
from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.config.fit import FitConfig, make_fit_config
from rlsprune.app.data.arrays import read_npz
from rlsprune.app.data.errors import DataError
from rlsprune.app.data.formats import read_cifar_archive, read_cifar_batch, read_idx, read_idx_pair
from rlsprune.app.data.matlab import read_svhn
from rlsprune.app.fit.model import load_weights
from rlsprune.app.report import write_report
from rlsprune.app.run.folder import RunFolder
from rlsprune.io import tensorfile
from rlsprune.io.atomic import FileError
from rlsprune.io.modelfile import read_metadata
from rlsprune.io.state import load_state, save_state

Damage = Callable[[random.Random], bytes]
"""Makes a damaged file; the same for the same state of the generator."""

VALUES = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, 1e308, math.nan, math.inf, "", "0", "cpu:99", [], {})
TRICKS = ("\x00", "\u202egnp.exe", "\u0435vil", "\ud800", "../../etc/passwd", "a" * 5000, "[" * 2000)
BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    match rng.randrange(8):
        case 0:
            return rng.choice(TRICKS)
        case 1 if depth < 4:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 2 if depth < 4:
            return {
                rng.choice(("a", "0", "epoch", "", "\u202e")): value(rng, depth + 1) for _ in range(rng.randrange(4))
            }
        case 3:
            return rng.randrange(-(2**70), 2**70)
        case 4:
            return rng.uniform(-10, 10)
        case _:
            return rng.choice(VALUES)


def edited(rng: random.Random, content: Any) -> Any:
    """JSON with one value, anywhere in it, changed, added or left out."""
    if isinstance(content, dict) and content and rng.randrange(10):
        key = rng.choice(sorted(content))
        match rng.randrange(5):
            case 0:
                return {**content, rng.choice(("odd", "", "seed ", "\u202eseed")): value(rng)}
            case 1:
                return {name: kept for name, kept in content.items() if name != key}
            case _:
                return {**content, key: edited(rng, content[key])}
    if isinstance(content, list) and content and rng.randrange(10):
        at = rng.randrange(len(content))
        return [*content[:at], edited(rng, content[at]), *content[at + 1 :]]
    return value(rng)


def damaged(original: bytes, head: int = 256) -> Damage:
    """Some bytes changed (mostly near the head, where sizes stand), and the file cut off, repeated or added to."""

    def damage(rng: random.Random) -> bytes:
        data = bytearray(original)
        for _ in range(rng.randrange(1, 7)):
            at = rng.randrange(rng.choice((min(head, len(data)), len(data))))
            data[at] = rng.choice(BYTES) if rng.randrange(2) else rng.randrange(256)
        match rng.randrange(5):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                data += rng.randbytes(rng.randrange(1, 65))
            case 2:
                start, end, at = sorted(rng.randrange(len(data)) for _ in range(3))
                data[at:at] = data[start:end][:4096]
        return bytes(data)

    return damage


def one_of(*damages: Damage) -> Damage:
    return lambda rng: rng.choice(damages)(rng)


def packed(damage: Damage, pack: Callable[[bytes], bytes]) -> Damage:
    """Damage under the compression or the checksum, which would otherwise hide it from the reader."""
    return lambda rng: pack(damage(rng))


def edited_json(content: Any) -> Damage:
    return one_of(lambda rng: as_json(edited(rng, content)), damaged(as_json(content)))


@dataclass(frozen=True)
class Target:
    """One loader and one way of damaging its files."""

    files: Damage
    load: Callable[[Path], object]
    refusals: tuple[type[Exception], ...] = (FileError,)
    core: bytes = b""
    """The part of a sound file that coverage-guided fuzzing changes; none if there are several files."""
    pack: Callable[[bytes], bytes] = bytes
    """From that part, changed, to a file whose compression and checksums fit it."""


def fnn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def written(write: Callable[[Path], object], tmp: Path) -> bytes:
    write(tmp / "file")
    return (tmp / "file").read_bytes()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def signer(original: bytes, key: str, tmp: Path) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The JSON in a file's header, and what puts another in its place under a checksum that fits it."""
    path = tmp / "signed"
    path.write_bytes(original)
    with safe_open(path, "pt") as file:
        text = file.metadata()[key]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    def sign(data: bytes) -> bytes:
        text = data.decode("utf-8", "replace")
        save_file(tensors, path, {key: text, "sha256": tensorfile.digest(text, tensors)})
        return path.read_bytes()

    return text.encode(), sign


def signed(text: bytes, sign: Callable[[bytes], bytes]) -> Damage:
    """Damage to the JSON in a file's header, as someone with bad intent would do it: the checksum fits."""
    return packed(one_of(lambda rng: as_json(edited(rng, json.loads(text))), damaged(text)), sign)


def repacked_zip(original: bytes) -> Damage:
    """Damage to a member of a zip archive before it is packed, so that its checksum fits."""
    members = {}
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        for name in archive.namelist():
            members[name] = archive.read(name)

    def damage(rng: random.Random) -> bytes:
        hit, method = rng.choice(sorted(members)), rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), damaged(content, 128)(rng) if name == hit else content)
        return buffer.getvalue()

    return damage


def zlib_mat(original: bytes) -> Damage:
    head, body = original[:128], original[128:]

    def pack(data: bytes) -> bytes:
        inside = zlib.compress(data, 1)
        return head + (15).to_bytes(4, "little") + len(inside).to_bytes(4, "little") + inside

    return packed(damaged(body, 80), pack)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def read_config(kind: type[RunConfig] | type[FitConfig]) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        path.rename(path.with_name("config.json"))
        return kind.from_dict(RunFolder(path.parent).read_json("config"))

    return read


def read_lines(path: Path) -> object:
    path.rename(path.with_name("metrics.jsonl"))
    return RunFolder(path.parent).read_lines("metrics")


LAYER = {"name": "a", "channels": 1, "nodes": 2, "weights": 6, "nodes_percent": 50.0, "weights_percent": 50.0}
RUN: dict[str, Any] = {
    "config": {"experiment": "digits", "method": "rls", "seed": 0, "epochs": 2, "pruning": {"ratio": 0.25}},
    "environment": {"torch": "2.6", "cores": 2},
    "metrics": [
        {"epoch": 1, "seconds": 1.5, "accuracy": 90.0, "train_loss": 0.5, "weights_percent": 100.0, "layers": []},
        {
            "epoch": 2,
            "seconds": 1.5,
            "accuracy": 91.0,
            "gate_level": 0.4,
            "weights_percent": 50.0,
            "flops_percent": 40.0,
            "layers": [
                {"name": "a", "channels": 1, "nodes": 2, "weights": 6, "nodes_percent": 50.0, "weights_percent": 50.0}
            ],
        },
    ],
    "events": [
        {
            "epoch": 1,
            "kind": "prune",
            "loss": 0.5,
            "accuracy_before": 90.0,
            "accuracy_after": 80.0,
            "layers": [{"name": "a", "before": 4, "after": 2}],
        }
    ],
    "summary": {
        "accuracy": 91.0,
        "unpruned_accuracy": 92.0,
        "speedups": [{"batch": 1, "low": 1.5, "median": 1.75, "high": 2.0}],
        "latency_ms": 1.0,
        "latency_unpruned_ms": 2.0,
        "latency_batch": 1,
        "layers": [
            {"name": "a", "channels": 1, "nodes": 2, "weights": 6, "nodes_percent": 50.0, "weights_percent": 50.0}
        ],
        "input_shape": [1, 2, 3],
        "kept_inputs": [0, 2, 5],
        "mean_input": "AAECAwQF",
        "health": [
            {
                "name": "a",
                "inputs": 2,
                "smallest_eigenvalue": 0.1,
                "largest_eigenvalue": 1.0,
                "trace": 1.0,
                "asymmetry": 0.0,
                "healthy": True,
            }
        ],
    },
}
"""The files of a run's folder that a page is made of."""


def edited_run(rng: random.Random) -> bytes:
    files = {name: edited(rng, content) if rng.randrange(3) == 0 else content for name, content in RUN.items()}
    return as_json(files)


def report(path: Path) -> None:
    for name, content in json.loads(path.read_bytes()).items():
        if name in ("metrics", "events"):
            lines = content if isinstance(content, list) else [content]
            (path.parent / f"{name}.jsonl").write_bytes(b"".join(as_json(line) + b"\n" for line in lines))
        else:
            (path.parent / f"{name}.json").write_bytes(as_json(content))
    write_report([path.parent], path.with_name("page.html"))


def weights(suffix: str) -> Callable[[Path], object]:
    def load(path: Path) -> None:
        load_weights(fnn(), path.rename(path.with_suffix(suffix)))

    return load


def make_targets(tmp: Path) -> dict[str, Target]:
    """By name. The sound files are made here."""
    torch.manual_seed(0)
    model = fnn()
    optimizer = rlsprune.RLS(model)
    model(torch.rand(4, 12)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "record": {"metrics": [{"epoch": 1}]},
        "random": torch.get_rng_state(),
    }

    model_file = written(lambda path: rlsprune.save(model, path, {"history": [1, 2]}), tmp)
    state_file = written(lambda path: save_state(path, state), tmp)
    pickle_file = written(lambda path: torch.save(model.state_dict(), path), tmp)
    plain_file = written(lambda path: save_file(model.state_dict(), path), tmp)
    images, marks = random_images(3), random_labels(3)
    idx = idx_bytes(random_images(3, (5, 4)))
    labels = tmp / "labels"
    labels.write_bytes(idx_bytes(random_labels(3)))
    batch = cifar_bytes(images, marks)
    archive = tar_gz_bytes({"test_batch.bin": batch})
    mat, packed_mat = (mat_bytes(svhn_variables(images, marks), compress) for compress in (False, True))
    arrays = io.BytesIO()
    features, names = np.arange(24.0).reshape(6, 4), np.array(list("ababab"))
    np.savez_compressed(arrays, x_train=features, y_train=names, x_test=features, y_test=names)
    config = make_config("digits-fnn").to_dict()
    fit_config = make_fit_config("net:build", "data.npz").to_dict()
    lines = "".join(json.dumps({"epoch": epoch, "accuracy": 98.5}) + "\n" for epoch in range(5)).encode()

    configs, npz = (FileError, ValueError), arrays.getvalue()
    damaged_pickle = one_of(damaged(pickle_file), repacked_zip(pickle_file))
    model_text, state_text = signer(model_file, "rlsprune", tmp), signer(state_file, "rlsprune-state", tmp)

    def load(path: Path) -> object:
        return rlsprune.load(path, into=fnn())

    return {
        "model": Target(damaged(model_file), load, core=model_file),
        "model, signed": Target(signed(*model_text), load, (FileError,), *model_text),
        "metadata": Target(signed(*model_text), read_metadata, (FileError,), *model_text),
        "state": Target(damaged(state_file), load_state, core=state_file),
        "state, signed": Target(signed(*state_text), load_state, (FileError,), *state_text),
        "weights .pt": Target(damaged_pickle, weights(".pt"), core=pickle_file),
        "weights .safetensors": Target(damaged(plain_file), weights(".safetensors"), core=plain_file),
        "idx": Target(one_of(damaged(idx), packed(damaged(idx), gzipped)), read_idx, (DataError,), idx),
        "idx pair": Target(damaged(idx), lambda path: read_idx_pair(path, labels), (DataError,), idx),
        "cifar .bin": Target(damaged(batch), read_cifar_batch, (DataError,), batch),
        "cifar .tar.gz": Target(
            one_of(damaged(archive), packed(damaged(gzip.decompress(archive)), gzipped)),
            lambda path: read_cifar_archive(path, ("test_batch.bin",)),
            (DataError,),
            gzip.decompress(archive),
            gzipped,
        ),
        "svhn .mat": Target(one_of(damaged(mat), damaged(packed_mat), zlib_mat(mat)), read_svhn, (DataError,), mat),
        "npz": Target(one_of(damaged(npz), repacked_zip(npz)), read_npz, (DataError,), npz),
        "config": Target(edited_json(config), read_config(RunConfig), configs, as_json(config)),
        "fit config": Target(edited_json(fit_config), read_config(FitConfig), configs, as_json(fit_config)),
        "metrics": Target(one_of(damaged(lines), lambda rng: as_json(value(rng))), read_lines, core=lines),
        "report": Target(edited_run, report),
    }
