from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planted.warm import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes with the libraries imported, for all tests that plant faults."""
    with Pool(2) as processes:
        yield processes
