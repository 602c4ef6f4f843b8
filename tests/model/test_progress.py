"""The line on the terminal: there where someone looks, gone afterwards, and nowhere else."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import rlsprune
from rlsprune.model.progress import shown_progress, watched


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_line_is_written_over_and_cleared() -> None:
    stream = Terminal()
    with shown_progress(stream=stream) as tell:
        tell("tracing", 0, None)
        tell("counting", 1, 4)  # too soon after the line before
        time.sleep(0.55)
        tell("counting", 2, 4)
    lines = stream.getvalue().split("\r")
    assert [line.rstrip() for line in lines] == ["", "tracing …", f"counting {'━' * 12}{'╌' * 12} 2/4", "", ""]


def test_work_that_is_done_at_once_shows_nothing() -> None:
    stream = Terminal()
    with shown_progress(stream=stream) as tell:
        assert list(watched([1, 2, 3], "counting", tell)) == [1, 2, 3]
    assert stream.getvalue() == ""


def test_silent_elsewhere_and_for_those_who_watch_themselves() -> None:
    plain, told = io.StringIO(), []
    with shown_progress(stream=plain) as tell:
        tell("tracing", 0, None)
    with shown_progress(lambda *stage: told.append(stage), Terminal()) as tell:
        tell("tracing", 0, None)
    assert plain.getvalue() == ""
    assert told == [("tracing", 0, None)]


def test_terminal_that_is_gone_does_not_end_the_work() -> None:
    stream = Terminal()
    with shown_progress(stream=stream) as tell:
        stream.close()
        tell("tracing", 0, None)


def test_shrink_and_export_show_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    rlsprune.shrink(model, torch.rand(4, 16, 8), target={"params": 0.5})
    assert "scoring" in stream.getvalue()
    rlsprune.export_onnx(model, torch.rand(2, 8), tmp_path / "small.onnx")
    assert "exporting to small.onnx" in stream.getvalue()
    assert "checking small.onnx" in stream.getvalue()
    assert not stream.getvalue().rpartition("\r")[2], "nothing is left of it"
