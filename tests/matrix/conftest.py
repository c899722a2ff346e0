"""Collects what became of the matrix's cells and prints it at the end of the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.matrix.cells import all_cells
from tests.matrix.outcomes import Outcome

_FOUND: dict[object, Outcome] = {}
_SECONDS = Counter[str]()


@pytest.fixture
def record() -> Iterator[Callable[[Outcome], None]]:
    """Books the outcome of a cell; the time goes to the whole matrix."""
    start = time.perf_counter()
    yield lambda outcome: _FOUND.__setitem__(outcome.cell, outcome)
    _SECONDS["matrix"] += time.perf_counter() - start  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Size and time: a cell that was not run, refused or not, shows in the count."""
    if not _FOUND:
        return
    kinds = Counter(str(outcome.kind) for outcome in _FOUND.values())
    words = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    terminalreporter.section("composition matrix")
    terminalreporter.line(
        f"{len(_FOUND)} of {len(all_cells())} cells in {_SECONDS['matrix']:.0f} s: {words}"
    )
