"""``python -m specdec``: the console script, for environments that are not activated."""

from __future__ import annotations

import sys

from specdec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
