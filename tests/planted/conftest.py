"""Prints the planted bugs and the check that detected each at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planted.warm import Pool

TABLE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes with the libraries imported, for all tests that plant faults."""
    with Pool(2) as processes:
        yield processes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table if the bugs were tested in this run."""
    text = terminalreporter.config.stash.get(TABLE, "")
    if text:
        terminalreporter.section("planted bugs")
        for line in text.splitlines():
            terminalreporter.line(line)
