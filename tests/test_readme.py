"""The code in README and docs runs as it is written, the commands in them exist, and links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import re
import shlex
import socket
from pathlib import Path

import pytest
import typer

import rlsprune
from rlsprune.app.cli.app import app
from rlsprune.app.cli.main import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (runs|file: \S+|needs \S+) -->\n)?^```(python|sh|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(page: Path, *kinds: str) -> list[tuple[str, str, str]]:
    """Note, kind and text of the page's blocks.

    The note: commands are to be run here, the block is a file, or it needs a package that the tests do not install.
    """
    found: list[tuple[str, str, str]] = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in found if block[1] in kinds]


def commands(text: str) -> list[list[str]]:
    """The arguments of the calls of rlsprune in a block for the shell."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [words[1:] for words in lines if words[:1] == ["rlsprune"]]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*does not have many workers")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.stem)
def test_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: what is shown as printed (but for its first line, which may hold a loss) is printed, and pruning prunes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "init_process_group" in page.read_text(encoding="utf-8"):
        # As torchrun sets them for a single process; the port is any that is free.
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    for note, kind, text in blocks(page, "python", "sh", "text"):
        with contextlib.redirect_stdout(printed):
            if note.startswith("file: "):
                Path(note.removeprefix("file: ")).write_text(text, encoding="utf-8")
            elif note.startswith("needs "):
                compile(text, str(page), "exec")
                if importlib.util.find_spec(note.removeprefix("needs ")):
                    exec(text.replace('weights="DEFAULT"', "weights=None").replace("224, 224", "64, 64"), names)
            elif kind == "python":
                exec(compile(text, str(page), "exec"), names)
            elif note == "runs":
                for arguments in commands(text):
                    # Tests run side by side: a second thread would wait for a core.
                    threads = ["--threads", "1"] if arguments[0] in ("run", "fit") else []
                    assert main([*arguments, *threads]) == 0, arguments
        if kind == "text":
            assert text.split("\n", 1)[1] in printed.getvalue()
    if "pruner" in names:
        assert any(event.kind == "prune" for event in names["pruner"].history)
    else:
        assert names["small"].chosen.params < names["small"].front[0].params


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    for _, _, block in blocks(page, "sh"):
        for name, *arguments in commands(block):
            command = group.commands[name]
            if hasattr(command, "commands"):
                name, *arguments = arguments
                command = command.commands[name]
            # Reads the arguments, so that an option which is not there is an error, and runs nothing.
            command.make_context(name, [argument for argument in arguments if argument != "--debug"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(((?!https?:)[^)#]+)", text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", ["method", "factors"])
def test_places_in_the_code_exist(page: str) -> None:
    """`optim.functional.gain` names a function of the package; a name without dots stands in the module before it."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"`((?:app|optim|prune|statistics)(?:\.\w+)+)`((?:, `\w+`)*)", text)
    assert found
    for address, others in found:
        names = address.split(".")
        depth = max(i for i in range(1, len(names) + 1) if find_module(names[:i]))
        for last in [names[depth:], *([name] for name in re.findall(r"\w+", others))]:
            assert functools.reduce(getattr, last, importlib.import_module(f"rlsprune.{'.'.join(names[:depth])}"))


def find_module(names: list[str]) -> bool:
    try:
        return importlib.util.find_spec(f"rlsprune.{'.'.join(names)}") is not None
    except ModuleNotFoundError:  # the name before is not a package
        return False


def test_readme_is_read_in_two_minutes() -> None:
    text = re.sub(r"^```.*?^```$", "", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 550


def test_defaults_in_the_settings_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(RLS|Pruner)\((.+?)\)` \| (.+?) \|", page, re.MULTILINE)
    assert len(found) >= 11
    for owner, settings, shown in found:
        signature = inspect.signature(getattr(rlsprune, owner))
        names = [setting.partition("=")[0] for setting in settings.split(", ")]
        defaults = [signature.parameters[name].default for name in names]
        values = [None if value == "none" else ast.literal_eval(value.strip("`")) for value in shown.split(", ")]
        assert values == defaults, names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lists_and_tables_stand_apart(page: Path) -> None:
    """Without an empty line before it, the site shows a list or a table as running text."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        first, *others = paragraph.strip().splitlines() or [""]
        starts = re.compile(r"(- |\d+\. |\|)")
        if not starts.match(first) and not first.startswith(("<!--", "#")):
            assert not [line for line in others if starts.match(line)], first
