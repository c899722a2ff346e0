from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.machines import Host, hosts, why_not


@pytest.fixture(scope="session")
def _allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def build(_allowed: None) -> Iterator[Callable[[int], list[Host]]]:
    """Builds hosts, which are removed after the test."""
    with ExitStack() as stack:
        yield lambda num: stack.enter_context(hosts(num))
