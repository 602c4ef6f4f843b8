"""``python -m rlsprune``."""

import sys

from rlsprune.cli import main

if __name__ == "__main__":
    sys.exit(main())
