"""What the package index shows: the README with addresses that work there, and the project's links.

Relative addresses mean nothing on a package index. A release sets RLSPRUNE_REPOSITORY to the repository that it is
made from, and addresses become absolute. Without it, images are left out and links become plain text: no address is
invented.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "RLSPRUNE_REPOSITORY"
_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def readme_on_an_index(text: str, repository: str | None, tag: str) -> str:
    """The README's text without relative addresses."""
    if repository is None:
        return _LINK.sub(r"\1", re.sub(r"\n{3,}", "\n\n", _IMAGE.sub("", text)))
    text = _IMAGE.sub(rf"![\1]({repository}/raw/{tag}/\2)", text)
    return _LINK.sub(rf"[\1]({repository}/blob/{tag}/\2)", text)


def links(repository: str | None, tag: str) -> dict[str, str]:
    """The project's links; none without a repository."""
    if repository is None:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling for every build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fills in what pyproject.toml calls dynamic."""
        repository = os.environ.get(VARIABLE, "").rstrip("/") or None
        tag = f"v{metadata['version']}"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_on_an_index(text, repository, tag)}
        metadata["urls"] = links(repository, tag)
