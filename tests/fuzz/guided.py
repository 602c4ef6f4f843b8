"""Coverage-guided fuzzing of one loader, by atheris: `python tests/fuzz/guided.py NAME SECONDS`, or `all` for all.

It starts from the sound file and its files in `corpus`, and fails with the input beside it (`crash-…`) if a loader
raises anything but its own errors, hangs or takes too much memory. Inputs that reach other code go to --found.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1])]
with atheris.instrument_imports(include=["rlsprune.io", "rlsprune.app.data", "rlsprune.app.config"]):
    from fuzz.targets import make_targets
    from fuzz.test_fuzz import NAMES, corpus_of, folder_of


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("seconds", type=int)
    parser.add_argument("--found", type=Path, help="a folder for inputs that reach other code")
    options = parser.parse_args()
    if options.name != "all":
        fuzz(options.name, options.seconds, options.found)
        return
    for name in NAMES:  # libFuzzer ends the process
        found = [] if options.found is None else ["--found", str(options.found)]
        subprocess.run([sys.executable, __file__, name, str(options.seconds), *found], check=True)


def fuzz(name: str, seconds: int, found: Path | None) -> None:
    """Does not come back, if there is anything to do."""
    scratch = Path(tempfile.mkdtemp())
    target = make_targets(scratch)[name]
    if not target.core:
        return
    start = scratch / "corpus"
    start.mkdir()
    for path in corpus_of(name):
        shutil.copy(path, start)
    (start / "sound").write_bytes(target.core)
    new = scratch / "new" if found is None else found / folder_of(name)
    new.mkdir(parents=True, exist_ok=True)

    def attempt(data: bytes) -> None:
        folder = scratch / "attempt"
        folder.mkdir()
        try:
            (folder / "file").write_bytes(target.pack(data))
            with contextlib.suppress(*target.refusals):
                target.load(folder / "file")
        finally:
            shutil.rmtree(folder)

    limits = ["-timeout=20", "-len_control=0", "-rss_limit_mb=3072", f"-max_len={max(4096, 2 * len(target.core))}"]
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={seconds}", "-print_final_stats=1", *limits, str(new), str(start)], attempt
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
