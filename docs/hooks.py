"""Called by mkdocs: writes the commands and their options into the page of the command line; dates stay on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from rlsprune.app.cli.app import app

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes a page: only one has the marker, only the records begin rows with dates."""
    markdown = re.sub(r"^\| (\d{4}-\d\d-\d\d) \|", r'| <span class="date">\1</span> |', markdown, flags=re.MULTILINE)
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def reference() -> str:
    """Every command, with its arguments and options."""
    return "\n\n".join(_section(name, command) for name, command in commands())


def commands() -> Iterator[tuple[str, Any]]:
    """Full name and click command; a command with others below it gives those."""
    for name, command in typer.main.get_command(app).commands.items():
        below = getattr(command, "commands", None)
        if below is None:
            yield f"rlsprune {name}", command
        else:
            yield from ((f"rlsprune {name} {inner}", one) for inner, one in below.items())


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    usage = " ".join([name, *(_placeholder(argument) for argument in arguments), "[OPTIONS]"])
    parts = [f"## {name}", _plain(command.help), f"```text\n{usage}\n```"]
    rows = [_row(parameter, context) for parameter in parameters if parameter.name != "help"]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    if command.epilog:
        parts.append(_plain(command.epilog))
    return "\n\n".join(parts)


def _placeholder(argument: Any) -> str:
    name = argument.name.upper() + ("…" if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _row(parameter: Any, context: Any) -> str:
    name, explained = (text.replace("|", r"\|") for text in parameter.get_help_record(context))
    return f"| `{name}` | {_plain(explained)} |"


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()
