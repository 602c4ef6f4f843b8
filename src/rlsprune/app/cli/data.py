"""`rlsprune data`: lists and downloads the data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from rlsprune.app.cli import options
from rlsprune.app.cli.speech import say
from rlsprune.app.data.catalog import ENTRIES

__all__ = ["app"]

app = typer.Typer(
    help="The data sets of the experiments.",
    epilog="Examples: `rlsprune data list` · `rlsprune data get mnist`",
    no_args_is_help=True,
)


@app.command("list", epilog="Example: `rlsprune data list --data-dir ~/data`")
def show(data_dir: options.DataDir = None) -> None:
    """List the data sets, and say which are on this machine."""
    from rlsprune.app.data import ENTRIES, DataError
    from rlsprune.app.data.catalog import locate

    for name, entry in ENTRIES.items():
        if not entry.layouts:
            state = "comes with rlsprune[cli]"
        else:
            try:
                _, found = locate(entry, data_dir)
                state = f"in {next(iter(found.values())).parent}"
            except DataError:
                state = f"not here: rlsprune data get {name}"
        say(f"{name:<14} {entry.title}: {state}")


@app.command("get", epilog="Example: `rlsprune data get mnist`")
def get(
    name: Annotated[
        str,
        typer.Argument(
            help="A data set, as `rlsprune data list` names it.", autocompletion=options.completing(tuple(ENTRIES))
        ),
    ],
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
) -> None:
    """Download a data set, or the missing part of it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from rlsprune.app.data import get as get_data

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet) as bar:
        tasks = {}

        def progress(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        files = get_data(name, data_dir, progress)
    say(f"{name}: {len(files)} files in {files[0].parent}" if files else f"{name} needs no files")
