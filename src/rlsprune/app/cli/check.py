"""`rlsprune check`: checks that a run's folder or a model file is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsprune.app.cli.speech import say

__all__ = ["EXAMPLES", "check"]

EXAMPLES = """Examples: `rlsprune check runs/digits-fnn-rls-seed0` · `rlsprune check small.safetensors`"""

_UNSOUND = 2


def check(
    path: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or a model file.")],
) -> None:
    """Read everything in a run's folder or a model file, and say what is wrong and what can be recovered.

    Nothing is changed and nothing in the files is executed. Exit code 0: all is sound, 2: something is not.
    """
    from rlsprune.app.integrity import check_file, check_run
    from rlsprune.io.atomic import FileError

    if not path.exists():
        raise FileError(path, "there is no such file or folder", "give the folder of a run, or a model file")
    findings = check_run(path) if path.is_dir() else check_file(path)
    for finding in findings:
        say(f"{'sound' if finding.wrong is None else 'WRONG'}  {finding.what}: {finding.wrong or finding.told}")
    if any(finding.wrong is not None for finding in findings):
        raise typer.Exit(_UNSOUND)
