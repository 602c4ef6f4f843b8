"""Prints the versions that are installed of everything that the package and its tests need, one a line."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def own_requirements(extras: Iterable[str]) -> list[str]:
    """Of the package with its extras; an extra may name others."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(text)
            texts += own_requirements(requirement.extras) if requirement.name == PROJECT["name"] else [text]
    return texts


def closure(texts: Iterable[str], extras: frozenset[str], found: dict[str, str], seen: set[str]) -> None:
    """Adds what is needed, and what that needs."""
    for text in texts:
        needed = Requirement(text)
        applies = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""})
        key = f"{canonicalize_name(needed.name)}{sorted(needed.extras)}"
        if applies and key not in seen:
            seen.add(key)
            distribution = metadata.distribution(needed.name)
            found[canonicalize_name(needed.name)] = distribution.version.split("+")[0]
            closure(distribution.requires or (), frozenset(needed.extras), found, seen)


def main() -> None:
    """Prints the lock."""
    found: dict[str, str] = {}
    closure(own_requirements(["dev"]), frozenset(), found, set())
    python = ".".join(map(str, sys.version_info[:2]))
    sys.stdout.write(f"# What the tests last ran with, on Python {python}; `make lock` writes this file.\n")
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted(found.items()))


if __name__ == "__main__":
    main()
