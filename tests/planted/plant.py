"""Runs the command line with one planted bug in the code, as a user would run it.

    python -m tests.planted.plant BUG COUNT_FILE verify strategy=speculative ...

The exit status is that of the command. COUNT_FILE gets the number of calls in which the planted
code differed from the shipped code, also if the command ends in an error.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(name: str, count_file: str, *arguments: str) -> int:
    """Plants ``name`` and runs ``specdec`` with ``arguments``."""
    from specdec.cli.main import main as specdec
    from tests.planted.bugs import planted

    with planted(name) as work:
        try:
            return specdec(arguments)
        finally:
            Path(count_file).write_text(str(work.fired), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
