"""What importing costs: names load when they are used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlsprune


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; sys.stdout.write(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not modules_after("import rlsprune") & {"torch", "numpy", "torch_pruning", "safetensors"}


def test_the_optimizer_needs_torch_alone() -> None:
    loaded = modules_after("import rlsprune; rlsprune.RLS")
    assert "torch" in loaded
    assert not loaded & {"torch_pruning", "safetensors", "matplotlib", "scipy", "typer", "mlxtend", "onnx"}


def test_every_public_name_is_there() -> None:
    for name in rlsprune.__all__:
        assert getattr(rlsprune, name) is not None
    assert set(dir(rlsprune)) == set(rlsprune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlsprune.nothing  # noqa: B018


def test_api_page_has_every_public_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    introduction = page[: page.index("\n## ")]
    for name in set(rlsprune.__all__) - {"__version__"}:
        home = getattr(rlsprune, name).__module__
        assert f"\n::: {home}.{name}\n" in page, name
        assert re.search(rf"`(rlsprune\.)?{name}`", introduction), name
