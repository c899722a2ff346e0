"""Collects what became of the matrix's cells and prints it at the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.conftest import DECODED, matrix_line
from tests.matrix.cells import all_cells
from tests.matrix.outcomes import Outcome

_FOUND: dict[object, Outcome] = {}


@pytest.fixture
def record() -> Callable[[Outcome], None]:
    return lambda outcome: _FOUND.__setitem__(outcome.cell, outcome)


def _kinds() -> Counter[str]:
    kinds = Counter(str(outcome.kind) for outcome in _FOUND.values())
    kinds[DECODED] = sum(outcome.decoded for outcome in _FOUND.values())
    return kinds


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands over what it has found; the first conftest prints it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _FOUND:
        output["matrix"] = {"kinds": dict(_kinds()), "cells": len(all_cells())}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints it, where one process runs all tests."""
    if _FOUND:
        terminalreporter.section("composition matrix")
        terminalreporter.line(matrix_line(_kinds(), len(all_cells())))
