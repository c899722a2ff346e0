"""Plants every bug in turn and runs ``specdec verify`` on it in a new process.

python -m tests.planted.hunt [BUG ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.planted.bugs import BUGS, SOUND

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class HuntResult:
    """The result of ``specdec verify`` on one bug.

    Attributes:
        bug: name of the bug.
        status: exit status of the command.
        checks: names of the failed checks.
        fired: number of calls in which the planted code differed from the shipped code.
        seconds: duration of the command.
        output: the end of the printed output.
    """

    bug: str
    status: int
    checks: tuple[str, ...]
    fired: int
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        """Whether the bug had an effect, the exit status is 1 and a check failed."""
        return self.fired > 0 and self.status == 1 and bool(self.checks)


def hunt(names: Sequence[str]) -> list[HuntResult]:
    """Tests bugs, ``PROCESSES`` at a time."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(find, names))


def find(name: str) -> HuntResult:
    """Runs ``specdec verify`` with one bug planted; ``SOUND`` plants none."""
    with tempfile.TemporaryDirectory() as folder:
        out, count = Path(folder) / "certificate", Path(folder) / "fired"
        arguments = ["verify", *BUGS[name].overrides, f"output_dir={out}"]
        command = [sys.executable, "-m", "tests.planted.plant", name, str(count), *arguments]
        start = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        seconds = time.perf_counter() - start
        result = out / "verify.json"
        checks = json.loads(result.read_text("utf-8"))["checks"] if result.is_file() else []
        return HuntResult(
            bug=name,
            status=done.returncode,
            checks=tuple(c["name"] for c in checks if c["passed"] is False),
            fired=int(count.read_text("utf-8")) if count.is_file() else 0,
            seconds=seconds,
            output=(done.stdout + done.stderr)[-3000:],
        )


def table(results: Sequence[HuntResult]) -> str:
    """A line per bug with the checks that failed, then the count."""
    width = max(len(one.bug) for one in results)
    lines = [
        f"{one.bug:<{width}}  {', '.join(one.checks) if one.caught else 'NOT FOUND'}"
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
    results = hunt(names or [name for name in BUGS if name not in SOUND])
    for one in results:
        if not one.caught:
            print(f"{one.bug}: exit status {one.status}, fired {one.fired}\n{one.output}\n")
    print(table(results))
    return 0 if all(one.caught for one in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
