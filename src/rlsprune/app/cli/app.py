"""The application with all commands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import rich  # noqa: F401  # only the progress display needs it; if missing, it raises before a run, not during it
import typer

import rlsprune
from rlsprune.app.cli import bench, check, compare, data, fit, pareto, plan, report, run
from rlsprune.app.cli.main import ABOUT
from rlsprune.distributed.torchrun import joined, started_by_torchrun

__all__ = ["app", "execute"]

_EPILOG = """Examples: `rlsprune run` · `rlsprune fit my_module:build_model --data photos/` · `rlsprune report runs/*`

--debug, at any place, shows the traceback of an error.

Exit codes: 0 done · 1 failed (disk, network, a bug) · 2 wrong options, files or installation \
· 3 a data set is missing or damaged · 4 training diverged · 130 interrupted."""

app = typer.Typer(
    name="rlsprune",
    help=ABOUT,
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=run.EXAMPLES)(run.run)
app.command("fit", epilog=fit.EXAMPLES)(fit.fit)
app.command("compare", epilog=compare.COMPARE_EXAMPLES)(compare.compare)
app.command("sweep", epilog=compare.SWEEP_EXAMPLES)(compare.sweep)
app.command("pareto", epilog=pareto.EXAMPLES)(pareto.pareto)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(rlsprune.__version__)
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of all commands."""


def _show_flags_bare(command: Any) -> None:
    """Removes `<bool>`, which typer shows beside a flag although it takes no value."""
    for parameter in command.get_params(command.context_class(command)):
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _show_flags_bare(inner)


def execute(arguments: Sequence[str]) -> int:
    """Runs a command; usage errors are shown here, all others are raised."""
    command = typer.main.get_command(app)
    _show_flags_bare(command)
    try:
        with joined() if started_by_torchrun() else nullcontext():
            code = command.main(args=list(arguments), prog_name="rlsprune", standalone_mode=False)
    except Exception as error:
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0
