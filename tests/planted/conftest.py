"""Prints which planted bugs were found, and by what, at the end of the run."""

from __future__ import annotations

import pytest

TABLE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, where the hunt has been run."""
    text = terminalreporter.config.stash.get(TABLE, "")
    if text:
        terminalreporter.section("planted bugs")
        for line in text.splitlines():
            terminalreporter.line(line)
