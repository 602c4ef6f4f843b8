"""Runs of the command line that are compared with each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ["run", "digits-fnn", "--train-images", "648", "--test-images", "200", "--warmup-epochs", "1", "--quiet"]


def agree(folder: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Both have pruned something, the same, and have the same losses."""
    events = [[event["layers"] for event in _lines(run, "events.jsonl")] for run in (folder, other)]
    assert events[0] == events[1] != []
    for mine, theirs in zip(_lines(folder, "metrics.jsonl"), _lines(other, "metrics.jsonl"), strict=True):
        for name in ("train_loss", "gate_loss", "test_loss", "weights_percent"):
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance), (mine["epoch"], name)


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]
