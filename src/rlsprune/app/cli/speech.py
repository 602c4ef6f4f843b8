"""Output to the terminal that no path, file or library message can control."""

from __future__ import annotations

import typer

from rlsprune.model.arguments import printable

__all__ = ["say"]


def say(text: str, *, err: bool = False) -> None:
    """Prints lines, with control characters escaped.

    Args:
        text: The text, from any source.
        err: Whether to print to standard error.
    """
    typer.echo(printable(text), err=err)
