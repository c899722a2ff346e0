"""``specdec verify`` in a new process, for code that has a fault."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted.warm import ROOT, Warm


@dataclass(frozen=True, slots=True)
class Certificate:
    """How the command ended.

    Attributes:
        status: exit status; ``warm.TIMED_OUT`` if it was ended.
        checks: names of the failed checks.
        detail: detail of the first failed check.
        raised: whether the strategy raised an error in that check.
        seconds: duration of the command.
        output: the end of the printed output.
    """

    status: int
    checks: tuple[str, ...]
    detail: str
    raised: bool
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        """Whether the command returned 1 and a check failed."""
        return self.status == 1 and bool(self.checks)


def certificate(
    warm: Warm,
    words: Sequence[str],
    folder: Path,
    *,
    code: Path = ROOT,
    timeout_s: float = 900.0,
) -> Certificate:
    """Runs a command that certifies, and reads its ``verify.json``.

    Args:
        warm: runs it.
        words: module and arguments, without ``output_dir``.
        folder: for the results, an existing folder.
        code: folder of the packages, which the process imports.
        timeout_s: the process and its children are ended after this time.
    """
    out, printed = folder / "certificate", folder / "printed"
    start = time.perf_counter()
    status = warm.run([*words, f"output_dir={out}"], code, printed, timeout_s)
    seconds = time.perf_counter() - start
    result = out / "verify.json"
    checks = json.loads(result.read_text("utf-8"))["checks"] if result.is_file() else []
    failed = [check for check in checks if check["passed"] is False]
    detail = failed[0]["detail"] if failed else ""
    return Certificate(
        status=status,
        checks=tuple(check["name"] for check in failed),
        detail=detail,
        raised=detail.startswith("raised "),
        seconds=seconds,
        output=printed.read_text("utf-8", errors="replace")[-3000:],
    )
