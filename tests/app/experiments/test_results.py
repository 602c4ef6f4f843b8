"""The tables in the documentation are drawn from the files of the runs that are kept beside them."""

import json
import shutil
from pathlib import Path

import pytest

from rlsprune.app.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
COMPARED = sorted(path.parent for path in (DOCS / "results").glob("*/comparison.json"))


@pytest.mark.parametrize("folder", COMPARED, ids=lambda path: path.name)
def test_tables_are_those_of_the_runs(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / folder.name
    shutil.copytree(folder, copied)
    kept = json.loads((folder / "comparison.json").read_text())
    (copied / "comparison.md").unlink()
    command = ["compare", kept["experiment"], "--finished", "--seeds", ",".join(map(str, kept["seeds"]))]
    command += ["--preset", kept["preset"], "--threads", "1", "--device", "cpu"]
    assert main([*command, "--out", str(copied), "--quiet"]) == 0
    drawn = (copied / "comparison.md").read_text()
    assert drawn == (folder / "comparison.md").read_text()
    pages = "\n".join(path.read_text() for path in (DOCS / "records").glob("*.md"))
    tables = [part for part in drawn.split("\n\n") if part.startswith("|")]
    assert len(tables) == (2 if kept["paper_table"] is None else 3)
    missing = [table for table in tables if table.strip() not in pages]
    assert not missing, f"no record shows these tables of {folder.name} as they are"


def test_there_are_runs_to_draw_from() -> None:
    assert COMPARED
