"""``python -m rlsprune``."""

import sys

from rlsprune.app.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
