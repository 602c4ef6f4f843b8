"""The public names: what importing them costs, and that each is documented with an example."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rlsprune

PACKAGE = Path(rlsprune.__file__).parent


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


ROOT = Path(__file__).parents[1]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
HIDDEN = re.compile("|".join(re.findall(r'"!(\^[^"]+)"', (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))))
INTEGRATIONS = ("lightning", "transformers", "sklearn")


def shown(address: str) -> Any:
    module, _, name = address.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        if str(error.name).startswith("rlsprune"):
            raise
        pytest.skip(str(error))  # an extra is not installed


def test_api_page_has_every_public_name() -> None:
    introduction = API[: API.index("\n## ")]
    for name in set(rlsprune.__all__) - {"__version__"}:
        assert f"{getattr(rlsprune, name).__module__}.{name}" in SHOWN
        assert re.search(rf"`(rlsprune\.)?{name}`", introduction), name


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_api_page_has_every_integration(integration: str) -> None:
    module = pytest.importorskip(f"rlsprune.{integration}", exc_type=ImportError)
    for name in module.__all__:
        assert f"{module.__name__}.{name}" in SHOWN


@pytest.mark.parametrize("address", SHOWN)
def test_public_name_has_an_example_that_runs(address: str) -> None:
    """It runs with the doctests."""
    assert doctest.DocTestFinder(recurse=False).find(shown(address))[0].examples


@pytest.mark.parametrize("address", SHOWN)
def test_public_methods_are_documented_and_shown(address: str) -> None:
    """Each one occurs in a doctest, or in a block of the documentation, all of which are run."""
    thing = shown(address)
    if not inspect.isclass(thing):
        return
    examples = "\n".join([*doctests(), *blocks()])
    for name, member in vars(thing).items():
        member = getattr(member, "__func__", member)
        if HIDDEN.search(name) or not (callable(member) or isinstance(member, property)):
            continue
        assert (member.__doc__ or "").strip(), f"{address}.{name} has no docstring"
        assert re.search(rf"\.{name}\b", examples), f"{address}.{name} occurs in no example"


@cache
def doctests() -> list[str]:
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return [line for text in texts for line in re.findall(r"^ *(?:>>>|\.\.\.) (.+)", text, re.MULTILINE)]


@cache
def blocks() -> list[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return [
        block
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]
