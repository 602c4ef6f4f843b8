"""Checks of a run's folder or of one file: everything is read and compared with what it should be, nothing changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.experiments.methods import build_model
from rlsprune.app.experiments.registry import experiment
from rlsprune.app.fit.bundle import DIGESTS, INT8, ONNX, PREDICT
from rlsprune.app.report.runs import read_runs
from rlsprune.app.run.checkpoints import Checkpoints
from rlsprune.app.run.folder import RunFolder
from rlsprune.io import modelfile
from rlsprune.io.atomic import FileError, file_digest
from rlsprune.io.state import load_state

__all__ = ["Finding", "check_file", "check_run"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    """The file, or a name for what was tried."""
    wrong: str | None
    """The problem; None if there is none."""
    told: str = ""
    """The contents of a sound file, or the part of the run that can be recovered."""


def check_file(path: Path) -> list[Finding]:
    """Checks a model file of `rlsprune.save` or the state of a checkpoint: checksum of every byte, and contents."""
    return [_found(path.name, lambda: _model(path))] if _is_model(path) else [_found(path.name, lambda: _state(path))]


def check_run(path: Path) -> list[Finding]:
    """Checks a run's folder: its files, their order, its checkpoints, and whether its network runs.

    The network of `rlsprune fit` is not built: that would execute the code that the folder names.
    """
    return list(_run(path))


def _run(path: Path) -> Iterator[Finding]:
    folder = RunFolder(path)
    configs: list[RunConfig | FitConfig] = []
    digests: dict[str, Any] = {}

    def config() -> str:
        values = folder.read_json("config")
        configs.append(FitConfig.from_dict(values) if "import_from" in values else RunConfig.from_dict(values))
        return f"{configs[0].method}, seed {configs[0].seed}, {configs[0].epochs} epochs"

    def lines() -> str:
        [run] = read_runs([path])
        late = [event["epoch"] for event in run.events if event["epoch"] > len(run.metrics)]
        if late:
            problem = f"an event belongs to epoch {late[0]}, but metrics.jsonl ends with epoch {len(run.metrics)}"
            raise FileError(path / "events.jsonl", problem, "resume the run, which rewrites both")
        if run.summary is not None and configs and len(run.metrics) != configs[0].epochs:
            problem = f"it has {len(run.metrics)} lines, but the finished run has {configs[0].epochs} epochs"
            raise FileError(path / "metrics.jsonl", problem, "restore it, or remove summary.json and resume the run")
        known = {} if run.summary is None else run.summary.get(DIGESTS, {})
        if not isinstance(known, dict):
            raise FileError(path / "summary.json", f"its {DIGESTS} is not an object", "remove it and resume the run")
        digests.update(known)
        return f"{len(run.metrics)} epochs, {len(run.events)} events"

    yield _found("links", lambda: _no_links(folder))
    yield _found("config.json", config)
    yield _found("metrics.jsonl, events.jsonl, summary.json", lines)
    sound = []
    for checkpoint, epoch, wrong in Checkpoints(path / "checkpoint").examine():
        sound += [epoch] if wrong is None else []
        yield Finding(f"checkpoint/{checkpoint.name}", wrong, f"epoch {epoch}")
    if folder.finished or folder.model.exists():
        yield _found("model.safetensors", lambda: _final_model(folder))
        if configs and isinstance(configs[0], RunConfig):
            chosen = configs[0]
            yield _found("the network runs", lambda: _runs(chosen, folder.model))
    for name in (ONNX, INT8, PREDICT):
        if (path / name).exists() or name in digests:
            yield _found(name, lambda name=name: _same(path / name, digests.get(name)))  # type: ignore[misc]
    if not folder.finished:
        remedy = f"resuming continues after epoch {max(sound)}" if sound else "resuming starts the run again"
        yield Finding("not finished", None, remedy)


def _found(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, None, look())
    except (ValueError, OSError) as error:  # FileError among them
        return Finding(what, str(error))


def _same(path: Path, digest: Any) -> str:
    if not path.is_file():
        raise FileError(path, "it is missing or not a regular file", "resume the run, which writes it again")
    if digest is None:
        return "no checksum of it is known"
    if file_digest(path) != digest:
        raise FileError(path, "it does not match its checksum in summary.json", "remove it and resume the run")
    return "checksum right"


def _no_links(folder: RunFolder) -> str:
    folder.refuse_links()
    return "none lead out of the folder"


def _model(path: Path) -> str:
    said = modelfile.verify(path)
    weights = sum(torch.Size(shape).numel() for shape in said["shapes"].values())
    return f"{len(said['shapes'])} tensors, {weights:,} numbers, checksum right"


def _state(path: Path) -> str:
    return f"{len(load_state(path))} parts, checksum right"


def _final_model(folder: RunFolder) -> str:
    told = _model(folder.model)
    inside: Any = modelfile.read_metadata(folder.model)["metadata"].get("events")
    beside = folder.read_lines("events")
    if folder.finished and inside is not None and json.dumps(inside) != json.dumps(beside):
        raise FileError(
            folder.model, "its events are not those of events.jsonl", "remove summary.json and resume the run"
        )
    return told


def _runs(config: RunConfig, path: Path) -> str:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = modelfile.load(path, into=build_model(replace(config, device="cpu"))).eval()
        output = model(torch.zeros(1, *experiment(config.experiment).input_shape))
    if not bool(output.isfinite().all()):
        raise FileError(path, "its network returns numbers that are not finite", "resume the run from a checkpoint")
    return f"{sum(p.numel() for p in model.parameters()):,} parameters, {output.shape[1]} outputs"


def _is_model(path: Path) -> bool:
    """Tells a model file from the state of a checkpoint by its name."""
    return path.name != "state.safetensors"
