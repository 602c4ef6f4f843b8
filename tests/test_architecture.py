"""The two floors: the library below, the application on top, and imports that point downwards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rlsprune"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top to the bottom: a room imports from itself and from those after it.
LIBRARY = (
    *("", "lightning", "transformers", "sklearn", "shrinking"),
    *("prune", "reconstruction", "statistics", "optim", "graph", "training", "io", "distributed", "model"),
)
ENTRY = PACKAGE / "__main__.py"  # ``python -m rlsprune``, the door to the upper floor


def room(module: str) -> str:
    """The first name below the package; empty for the package itself."""
    return module.removeprefix("rlsprune").lstrip(".").partition(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, wherever it does so, for type checkers as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "rlsprune")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlsprune":
            assert node.level == 0, f"{path} imports relatively"
            if node.module == "rlsprune":
                yield from (f"rlsprune.{name.name}" for name in node.names)
            else:
                yield node.module or ""


def name_of(path: Path) -> str:
    return ".".join(("rlsprune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    own = room(name_of(path))
    if own == "app" or path == ENTRY:
        return
    for module in imports(path):
        other = room(module)
        assert other != "app", f"{path} is of the library and imports {module}, of the application"
        if own:  # the package itself, which only gathers the public names, may import from every room
            assert LIBRARY.index(other) >= LIBRARY.index(own), f"{path} imports {module}, which stands above it"


def test_every_file_is_in_a_known_room() -> None:
    unknown = {room(name_of(path)) for path in FILES} - {*LIBRARY, "app", "__main__"}
    assert not unknown


def types_of(path: Path) -> Iterator[str]:
    """The classes and type aliases of a module that have no leading underscore."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [node.name] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in names if re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", name))


def test_no_two_types_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for name in types_of(path):
            homes.setdefault(name, []).append(name_of(path))
    homes.pop("PruneCallback")  # one for each library's trainer
    double = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not double
