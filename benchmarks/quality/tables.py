"""The tables that compare methods at equal size and cost: tunes, runs and draws them, one command a table.

`python -m benchmarks.quality.tables tune mnist --data-dir DATA` chooses every method's rate on held-out training
images, with as many trials for each; `run mnist` then makes the runs that are missing, cheapest first; `draw mnist`
writes the table and the picture from the records. All of it can be interrupted and goes on where it was; with --retry
what failed is tried again too. Runs go to --runs, what is kept of them to --records.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rlsprune.app.experiments.registry import METHODS
from rlsprune.app.tables.draw import draw
from rlsprune.app.tables.plan import TABLES
from rlsprune.app.tables.queue import TableQueue

RECORDS = Path("docs/results/tables")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tune", "run", "draw"])
    parser.add_argument("tables", nargs="+", choices=list(TABLES), metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--limit", type=int, help="run so many cells of a table at most")
    parser.add_argument("--retry", action="store_true", help="also what failed before")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="only these")
    parser.add_argument("--data-dir")
    parser.add_argument("--no-verify", action="store_true", help="read data files whose checksum is another")
    parser.add_argument("--runs", type=Path, default=Path("runs/tables"))
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    machine = {"data_dir": options.data_dir, "verify": not options.no_verify, "threads": 1, "device": "cpu"}
    for name in options.tables:
        if options.what == "draw":
            print(draw(name, options.records))
            continue
        queue = TableQueue(
            name=name,
            runs=options.runs,
            records=options.records,
            machine=machine,
            say=lambda text: print(time.strftime("%H:%M:%S"), text, flush=True),
            limit=options.limit,
            methods=options.methods,
            retry=options.retry,
        )
        if options.what == "tune":
            queue.tune()
        else:
            queue.run(options.jobs)


if __name__ == "__main__":
    main()
