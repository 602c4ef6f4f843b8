"""`rlsprune report`: the page of one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsprune.app.cli.speech import say

__all__ = ["EXAMPLES", "report"]

EXAMPLES = """Examples: `rlsprune report runs/digits-fnn-rls-seed0` ·
`rlsprune report runs/* --out all.html` ·
`rlsprune report runs/digits-fnn-rls-seed0 --watch` (while it trains)"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write. Default: report.html in the run's folder; for several runs, in this folder.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep the page up to date until the runs end; Ctrl-C ends watching.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="With --watch: seconds between updates.")] = 2.0,
) -> None:
    """Write a page that shows runs, finished or not: one HTML file that opens offline."""
    from rlsprune.app.report import write_report
    from rlsprune.app.report.watch import watch as keep_up

    page = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    if not watch:
        say(f"Written to {write_report(runs, page)}")
        return
    say(f"Keeping {page} up to date; open it in a browser. Ctrl-C ends watching.")
    try:
        keep_up(runs, page, every)
    except KeyboardInterrupt:
        say(f"\nNo longer watching; {page} stays as it is.")
    else:
        say("The runs are done." if len(runs) > 1 else "The run is done.")
