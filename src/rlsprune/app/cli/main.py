"""The entry point of the command line, with one-line errors and the exit codes."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TypeGuard

import rlsprune
from rlsprune.model.arguments import printable

__all__ = ["ABOUT", "main"]

ABOUT = "Make PyTorch networks smaller, while they train or after they are trained."

FAILED = 1  # any other error: the disk, the network, a bug
USAGE = 2  # options, settings, files or an installation that do not fit
NO_DATA = 3  # a data set is missing or damaged
DIVERGED = 4  # numbers that are not finite
INTERRUPTED = 130

_EXTRA = {
    **dict.fromkeys(("typer", "rich", "click", "matplotlib", "jinja2", "markupsafe", "tensorboard"), "cli"),
    "torch_pruning": "cli",
    **dict.fromkeys(("mlflow", "wandb"), "loggers"),
}
"""The extra that installs a package."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Args:
        arguments: The arguments; None for those of the process. ``--debug`` anywhere among them shows tracebacks.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow that a terminal cannot show must not end a run
    warnings.formatwarning, given_format = _format_warning, warnings.formatwarning
    try:
        from rlsprune.app.cli.app import execute

        code = execute([argument for argument in given if argument != "--debug"])
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if _needs_extra(error) and (answer := _answer(given)) is not None:
            sys.stdout.write(answer)
            return 0
        if debug:
            sys.stderr.write(printable(traceback.format_exc()))
        return _explain(error, debug)
    finally:
        warnings.formatwarning = given_format
    return _say("interrupted", INTERRUPTED) if code == INTERRUPTED else code


def _needs_extra(error: Exception) -> TypeGuard[ModuleNotFoundError]:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRA


def _answer(given: Sequence[str]) -> str | None:
    """Returns the answer to --version or --help without the packages of the command line; None for other arguments."""
    if given and given[0] == "--version":
        return f"{rlsprune.__version__}\n"
    if given and not {"--help", "-h"} & set(given):
        return None
    return (
        f"rlsprune {rlsprune.__version__}: {ABOUT}\n\n"
        "Its commands need packages that are not installed. Install them with\n\n"
        '    pip install "rlsprune[cli]"\n\n'
        "and `rlsprune --help` shows more. The library (`import rlsprune`) works without them.\n"
    )


def _explain(error: Exception, debug: bool) -> int:
    if _needs_extra(error):
        extra = _EXTRA[(error.name or "").partition(".")[0]]
        # pip takes the extra of the installed version, whatever its source
        return _say(f'{error.name} is not installed: run `pip install "rlsprune[{extra}]"`', USAGE)
    message = str(error) or type(error).__name__
    # Compared by name, because importing the classes would import torch.
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if "rlsprune.app.data.errors.DataError" in kinds:
        return _say(message, NO_DATA)
    if isinstance(error, FloatingPointError):
        return _say(message, DIVERGED)
    if isinstance(error, ValueError):
        return _say(message, USAGE)
    if isinstance(error, OSError) or "rlsprune.app.experiments.jobs.RunFailedError" in kinds:
        return _say(message, FAILED)
    hint = "" if debug else " (--debug shows where)"
    return _say(f"{type(error).__name__}: {message}{hint}", FAILED)


def _format_warning(message: Warning | str, category: type[Warning], *place: object, **line: object) -> str:
    """Formats a warning in one line, without its place in the code, which does not help users."""
    return f"rlsprune: {category.__name__}: {printable(' '.join(str(message).split()))}\n"


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"rlsprune: {printable(' '.join(message.split()))}\n")
    return code
