"""Fixed samples of large tests: the suite runs these, ``make test-exhaustive`` the others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int, *, start: int = 0) -> list[Any]:
    """Cases as parameters, all but every ``every``-th one marked as exhaustive.

    Args:
        cases: of ``pytest.mark.parametrize``; tuples are the values of several parameters.
        every: distance between two cases of the sample.
        start: number of the first case of the sample.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number % every == start else pytest.mark.exhaustive,
        )
        for number, case in enumerate(cases)
    ]


def checkered(rows: Iterable[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as parameters, every second one of each row and column marked as exhaustive."""
    return [
        pytest.param(row, column, marks=() if (at + to) % 2 else pytest.mark.exhaustive)
        for at, row in enumerate(rows)
        for to, column in enumerate(columns)
    ]
