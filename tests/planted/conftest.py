"""Prints the planted bugs and the check that detected each at the end of the run."""

from __future__ import annotations

import pytest

TABLE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table if the bugs were tested in this run."""
    text = terminalreporter.config.stash.get(TABLE, "")
    if text:
        terminalreporter.section("planted bugs")
        for line in text.splitlines():
            terminalreporter.line(line)
