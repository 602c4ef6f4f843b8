"""Words for the terminal: nothing that a path, a file or a library's message contains can command it."""

from __future__ import annotations

import typer

from rlsprune.model.arguments import printable

__all__ = ["say"]


def say(text: str, *, err: bool = False) -> None:
    """Prints lines, with control characters escaped.

    Args:
        text: Of any origin.
        err: To standard error.
    """
    typer.echo(printable(text), err=err)
