"""The README's code runs as it is written, and prints what it says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    # The first event, but for its loss, whose last digit may depend on the machine.
    assert shown[1].splitlines()[1:] == printed.getvalue().splitlines()[1 : len(shown[1].splitlines())]
    assert (tmp_path / "small.onnx").stat().st_size > 0
    pruned = names["pruner"].history
    assert pruned
    assert pruned[-1].params_after < 1474


def test_commands_exist() -> None:
    text = README.read_text(encoding="utf-8")
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(((?!https?:)[^)#]+)\)", text):
        assert (README.parent / link).exists(), link
