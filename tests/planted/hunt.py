"""Plants every bug in turn and runs ``specdec verify`` on it in a new process.

python -m tests.planted.hunt [BUG ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted.bugs import BUGS, SOUND
from tests.planted.certificate import Certificate, certificate
from tests.planted.warm import Pool, Warm

PROCESSES = 2


@dataclass(frozen=True, slots=True)
class HuntResult:
    """The result of ``specdec verify`` on one bug.

    Attributes:
        bug: name of the bug.
        fired: number of calls in which the planted code differed from the shipped code.
        found: how the command ended.
    """

    bug: str
    fired: int
    found: Certificate

    @property
    def caught(self) -> bool:
        """Whether the bug had an effect, the exit status is 1 and a check failed."""
        return self.fired > 0 and self.found.failed


def hunt(names: Sequence[str], pool: Pool) -> list[HuntResult]:
    """Tests bugs on the processes of a pool."""
    return list(pool.each(find, names))


def find(warm: Warm, name: str) -> HuntResult:
    """Runs ``specdec verify`` with one bug planted, up to the first check that fails.

    ``SOUND`` plants none, so that every check runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        count = Path(folder) / "fired"
        command = ["verify", "--fail-fast", *BUGS[name].overrides]
        words = ["tests.planted.plant", name, str(count), *command]
        found = certificate(warm, words, Path(folder))
        return HuntResult(name, int(count.read_text("utf-8")) if count.is_file() else 0, found)


def table(results: Sequence[HuntResult]) -> str:
    """A line per bug with the check that failed, then the count."""
    width = max(len(one.bug) for one in results)
    lines = [
        f"{one.bug:<{width}}  {', '.join(one.found.checks) if one.caught else 'NOT FOUND'}"
        for one in results
    ]
    listed = [one for one in results if BUGS[one.bug].listed]
    others = [one for one in results if not BUGS[one.bug].listed]
    lines.append(f"{sum(o.caught for o in listed)} of {len(listed)} planted bugs found")
    if others:
        lines.append(f"{sum(o.caught for o in others)} of {len(others)} further ones")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Tests the named bugs, or all; returns 0 if all are detected."""
    with Pool(PROCESSES) as pool:
        results = hunt(names or [name for name in BUGS if name not in SOUND], pool)
    for one in results:
        if not one.caught:
            print(
                f"{one.bug}: exit status {one.found.status}, fired {one.fired}\n"
                f"{one.found.output}\n"
            )
    print(table(results))
    return 0 if all(one.caught for one in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
