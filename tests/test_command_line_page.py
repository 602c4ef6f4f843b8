"""The page of the command line lists every command and option; mkdocs writes them when it builds the site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[1] / "docs"
specification = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
hooks = importlib.util.module_from_spec(specification)
specification.loader.exec_module(hooks)
COMMANDS = dict(hooks.commands())
SECTIONS = {section.split("\n")[0]: section for section in hooks.reference().split("## ")[1:]}


def test_page_has_a_place_for_it() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert hooks.MARKER not in hooks.on_page_markdown(page)
    assert "## rlsprune run\n" in hooks.on_page_markdown(page)
    settings = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(settings.split("\nplugins:")[0])["hooks"] == ["docs/hooks.py"]


def test_dates_of_records_stay_on_one_line() -> None:
    row = "| 2026-11-18 | [a claim](2026-11-18-a.md) |"
    assert hooks.on_page_markdown(row) == '| <span class="date">2026-11-18</span> | [a claim](2026-11-18-a.md) |'


@pytest.mark.parametrize(
    ("name", "command"), list(hooks.commands()), ids=lambda value: value if type(value) is str else ""
)
def test_every_option_is_listed_and_explained(name: str, command: object) -> None:
    section = SECTIONS[name]
    for parameter in command.get_params(command.context_class(command)):
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        for spelling in [*parameter.opts, *parameter.secondary_opts]:
            rows = [line for line in section.splitlines() if re.match(rf"\| `[^`]*(?<![\w-]){spelling}\b", line)]
            assert rows, f"{name} {spelling} is not listed"
            assert len(rows[0].split("` | ")[1].split()) > 2, f"{name} {spelling} is not explained"


def test_the_table_of_tasks_has_every_command() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for name in {" ".join(name.split()[:2]) for name in COMMANDS}:
        assert f"`{name}" in page
