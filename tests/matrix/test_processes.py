"""A pairwise sample of the matrix on real processes, one persistent group per number of stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from specdec.distributed import Lease
from specdec.errors import UserError
from specdec.executors.exit_building import refuse_several
from specdec.executors.hidden import refuse_hidden
from tests.matrix.cells import Cell, all_cells, config, cover, met, option, runner
from tests.matrix.outcomes import Kind, check, composed

pytestmark = pytest.mark.distributed

STAGES = (2, 3)
NUM_PARTS = 8


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """The groups stay up for all tests of the module."""
    leases = [Lease(stages, threads=1) for stages in STAGES]
    yield
    for lease in leases:
        lease.release()


@cache
def sample() -> list[Cell]:
    """Cells that run on processes: what meets in any of them meets in these."""
    staged = (c for c in all_cells() if "transport" in option("executor", c.executor))
    running = [c for c in staged if composed(c).kind is not Kind.REFUSED]
    first = {c.source: c for c in reversed(running)}
    sources = {source for source, cell in first.items() if _goes_over_ranks(cell)}
    assert "early_exit" in sources
    return cover((c for c in running if c.source in sources), met)


def _goes_over_ranks(cell: Cell) -> bool:
    """Whether the cell's source can be served by ranks; those that cannot are refused in words."""
    ready = runner(config(cell))
    try:
        needs = ready.parts.source.needs
        refuse_hidden(needs)
        refuse_several(needs)
    except UserError:
        return False
    finally:
        ready.close()
    return True


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_cells_on_processes(part: int) -> None:
    numbered = list(enumerate(sample()))[part::NUM_PARTS]
    assert numbered
    for number, cell in numbered:
        check(cell, transport="distributed", stages=STAGES[number // NUM_PARTS % len(STAGES)])
